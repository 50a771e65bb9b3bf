/** How to ask a deployment from elsewhere. */
import { SegmentedControl, Stack, Text } from "@mantine/core";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import { CopyBlock } from "../../components/CopyBlock";
import { snippet, type Language } from "./snippet";

interface Props {
  name: string;
  isEncoder: boolean;
}

export function Snippets({ name, isEncoder }: Props) {
  const { t } = useTranslation();
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
      <CopyBlock text={snippet(language, name, location.origin, isEncoder)} label={t("Example")} />
    </Stack>
  );
}
