import { QueryClient, QueryObserver } from "@tanstack/react-query";
import { expect, it } from "vitest";

import { fetchAgain } from "./fetchAgain";

it("replaces the response to a first request that was sent before the change", async () => {
  const client = new QueryClient();
  const answers: ((found: string) => void)[] = [];
  const queryFn = () => new Promise<string>((resolve) => answers.push(resolve));
  const observer = new QueryObserver(client, { queryKey: ["invites"], queryFn });
  const stop = observer.subscribe(() => undefined);
  expect(answers).toHaveLength(1);
  const again = fetchAgain(client, { queryKey: ["invites"] });
  await expect.poll(() => answers.length).toBe(2);
  answers[0]!("before");
  answers[1]!("after");
  await again;
  expect(client.getQueryData(["invites"])).toBe("after");
  stop();
});
