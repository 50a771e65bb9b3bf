/** Uploads on the server with their sizes, each with a button that deletes it. */
import { Button, Group, Stack, Text } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { api, body } from "../../../api/client";
import { fetchAgain } from "../../../api/fetchAgain";
import { catalogue, uploads } from "../../../api/queries";
import type { Upload } from "../../../api/types";
import { Failure } from "../../../components/Feedback";
import { Section } from "../../../components/frame/Page";
import { bytes } from "../../../format";
import classes from "../form/Form.module.css";

export function Uploads() {
  const { t } = useTranslation();
  const { data } = useQuery(uploads);
  if (data === undefined || data.uploads.length === 0) return null;
  return (
    <Section title={t("Uploads")}>
      <Text size="sm" c="dimmed">
        {t("{{used}} of {{limit}} are used.", { used: bytes(data.used_bytes), limit: bytes(data.limit_bytes) })}
      </Text>
      <Stack component="ul" gap="xs" className={classes.rows!}>
        {data.uploads.map((one) => (
          <Row key={one.id} upload={one} />
        ))}
      </Stack>
    </Section>
  );
}

function Row({ upload }: { upload: Upload }) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const removing = useMutation({
    mutationFn: () => body(api.DELETE("/api/v1/uploads/{upload_id}", { params: { path: { upload_id: upload.id } } })),
    onSuccess: () => {
      // No event reports uploads, some of which are models of the catalogue.
      void fetchAgain(client, { queryKey: catalogue.queryKey });
      return fetchAgain(client, { queryKey: uploads.queryKey });
    },
  });
  return (
    <li>
      <Group gap="sm" wrap="nowrap" align="center">
        <div className={classes.grow}>
          <Text size="sm" fw={500} truncate>
            {upload.name}
          </Text>
          <Text size="xs" c="dimmed">
            {KINDS[upload.kind](t)} · {t("{{count}} files", { count: upload.files.length })} · {bytes(upload.size_bytes)}
            {upload.state === "open" && ` · ${t("not complete")}`}
          </Text>
        </div>
        <Button
          size="compact-sm"
          variant="default"
          flex="none"
          loading={removing.isPending}
          onClick={() => removing.mutate()}
          aria-label={t("Remove {{name}}", { name: upload.name })}
        >
          {t("Remove")}
        </Button>
      </Group>
      {removing.error !== null && <Failure error={removing.error} />}
    </li>
  );
}

type Translate = ReturnType<typeof useTranslation>["t"];

const KINDS: Record<Upload["kind"], (t: Translate) => string> = {
  data: (t) => t("data"),
  model: (t) => t("model"),
  tokenizer: (t) => t("tokenizer"),
};
