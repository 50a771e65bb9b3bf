import { MantineProvider } from "@mantine/core";
import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { RouterProvider } from "@tanstack/react-router";
import { setNonce } from "get-nonce";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";

import { ApiProblem } from "./api/problem";
import { cluster } from "./api/queries";
import { may } from "./api/scopes";
import { onSession, startSession } from "./api/session";
import { followDensity } from "./density";
import { startWords } from "./i18n";
import { router } from "./router";
import "./styles.css";
import { theme, variables } from "./theme";

const queries = new QueryClient({
  defaultOptions: {
    mutations: { networkMode: "always" },
    queries: {
      // The server may be on this machine, which needs no network.
      networkMode: "always",
      // Live events report which data is out of date.
      staleTime: 60_000,
      refetchOnWindowFocus: false,
      retry: (failures, error) => failures < 3 && error instanceof ApiProblem && error.mayPass,
    },
  },
});

// Prefetched while the frame is drawn, because most users open this page first.
onSession((session) => {
  if (session.state === "in" && may(session.key, "read") && location.pathname === "/") void queries.prefetchQuery(cluster);
});
void startSession();

/** The nonce for styles that the server's Content-Security-Policy allows; Vite puts it into this tag. */
const nonce = document.querySelector<HTMLMetaElement>('meta[property="csp-nonce"]')?.nonce ?? "";
// Mantine's scroll lock behind dialogs adds its own style element.
setNonce(nonce);

followDensity();
await startWords();

createRoot(document.getElementById("root")!).render(
  <StrictMode>
    <MantineProvider theme={theme} cssVariablesResolver={variables} defaultColorScheme="auto" getStyleNonce={() => nonce}>
      <QueryClientProvider client={queries}>
        <RouterProvider router={router} />
      </QueryClientProvider>
    </MantineProvider>
  </StrictMode>,
);
