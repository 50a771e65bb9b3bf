/** Programs that call a deployment. */
import { SegmentedControl, Stack, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import { servedModels } from "../../api/queries";
import { CopyBlock } from "../../components/copy/CopyBlock";
import { routeOf, snippet, type Language, type Route } from "./snippet";

interface Props {
  name: string;
  /** The request to send; by default an example that suits the model. */
  request?: (route: Route) => Record<string, unknown>;
}

export function Snippets({ name, request }: Props) {
  const { t } = useTranslation();
  const { data: served } = useQuery(servedModels);
  const route = routeOf(served?.find((one) => one.id === name));
  const [language, setLanguage] = useState<Language>("python");
  return (
    <Stack gap="sm">
      <Text size="sm">{t("Any client of the OpenAI API works; its key is an API key of this server.")}</Text>
      <div>
        <SegmentedControl
          aria-label={t("Language of the example")}
          value={language}
          onChange={(value) => setLanguage(value as Language)}
          data={[
            { value: "python", label: "Python" },
            { value: "curl", label: "curl" },
          ]}
        />
      </div>
      <CopyBlock text={snippet(language, name, location.origin, route, request?.(route))} label={t("Example")} />
    </Stack>
  );
}
