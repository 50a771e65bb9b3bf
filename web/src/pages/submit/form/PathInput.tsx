/** A path on the server, or files to upload there: from a file picker, by drag and drop, or from an earlier upload. */
import { Button, Group, NativeSelect, Progress, Stack, Text, Textarea, TextInput, VisuallyHidden } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useEffect, useId, useRef, useState } from "react";
import { useTranslation } from "react-i18next";

import { fetchAgain } from "../../../api/fetchAgain";
import { catalogue, uploads } from "../../../api/queries";
import type { Upload, UploadKind } from "../../../api/types";
import { upload, type Sent } from "../../../api/upload";
import { Failure, sentence } from "../../../components/Feedback";
import { bytes } from "../../../format";
import { useWords } from "../schema/fieldWords";
import { dropped, nameOf, picked, usable } from "../uploads/files";
import classes from "./Form.module.css";
import { BELOW, useField, useForm } from "./form";
import type { Field } from "../schema/schema";
import { isStandIn } from "../starts/starts";

export function PathInput({ field }: { field: Field }) {
  const { value, set, error } = useField(field);
  const { label, help } = useWords();
  const isMany = field.kind === "paths";
  const kind: UploadKind = isMany ? "data" : field.path[0] === "tokenizer" ? "tokenizer" : "model";
  const paths = (Array.isArray(value) ? value : value === undefined || value === null ? [] : [value]).map(String);
  const [own, setOwn] = useState<string | null>(null);

  const type = (text: string) => {
    setOwn(text);
    const lines = text.split("\n").map((line) => line.trim()).filter((line) => line !== "");
    set(isMany ? lines : (lines[0] ?? undefined));
  };
  /** Insert the name of an upload, and remove the example's placeholder. */
  const take = (sent: Upload) => {
    setOwn(null);
    if (!isMany) return set(`upload:${sent.id}`);
    const fresh = sent.files.map((file) => `upload:${sent.id}/${file.path}`);
    set([...paths.filter((path) => !isStandIn(path) && !fresh.includes(path)), ...fresh]);
  };
  const common = {
    ...BELOW,
    label: label(field),
    description: help(field),
    error: error && sentence(error),
    value: own ?? paths.join("\n"),
    onBlur: () => setOwn(null),
    spellCheck: false,
    classNames: { input: classes.code! },
  };
  return (
    <Stack gap="xs">
      {isMany ? (
        <Textarea {...common} rows={Math.min(8, Math.max(2, paths.length))} onChange={(event) => type(event.currentTarget.value)} />
      ) : (
        <TextInput {...common} onChange={(event) => type(event.currentTarget.value)} autoComplete="off" />
      )}
      <Sender kind={kind} label={label(field)} onSent={take} />
    </Stack>
  );
}

interface SenderProps {
  kind: UploadKind;
  /** Label of the field that receives the files. */
  label: string;
  onSent: (sent: Upload) => void;
}

function Sender({ kind, label, onSent }: SenderProps) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const { onSending } = useForm();
  const known = useQuery(uploads).data;
  const earlier = known?.uploads.filter((one) => one.kind === kind && one.state === "complete") ?? [];
  const [sentBytes, setSentBytes] = useState(0);
  const [isOver, setOver] = useState(false);
  const abort = useRef<AbortController>(null);
  const input = useRef<HTMLInputElement>(null);
  const id = useId();
  // The form may have changed by the time the upload is complete.
  const latest = useRef(onSent);
  useEffect(() => {
    latest.current = onSent;
  });
  // Leaving the page aborts a running upload.
  useEffect(() => () => abort.current?.abort(), []);

  const sending = useMutation({
    mutationFn: async (files: readonly Sent[]) => {
      abort.current = new AbortController();
      setSentBytes(0);
      onSending(1);
      try {
        return await upload(nameOf(files), kind, files, setSentBytes, abort.current.signal);
      } finally {
        onSending(-1);
      }
    },
    onSuccess: (sent) => latest.current(sent),
    onSettled: () => {
      // Uploads cause no events, and some of them are models of the catalogue.
      void fetchAgain(client, { queryKey: catalogue.queryKey });
      return fetchAgain(client, { queryKey: uploads.queryKey });
    },
  });
  const { files, leftOut } = usable(sending.variables ?? [], kind);
  const total = files.reduce((sum, { file }) => sum + file.size, 0);
  const start = (found: readonly Sent[]) => {
    const { files: some } = usable(found, kind);
    if (found.length > 0 && !sending.isPending) sending.mutate(some.length > 0 ? some : found);
  };
  const isAborted = sending.error !== null && abort.current?.signal.aborted === true;

  return (
    <div
      className={classes.drop}
      data-over={isOver}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        void dropped(event.dataTransfer).then(start);
      }}
    >
      <Group gap="sm" align="center">
        <Button size="xs" variant="default" onClick={() => input.current?.click()} disabled={sending.isPending}>
          {kind === "data" ? t("Upload files") : t("Upload a folder")}
        </Button>
        <VisuallyHidden>
          <input
            ref={input}
            type="file"
            tabIndex={-1}
            multiple
            aria-label={t("Files for {{field}}", { field: label })}
            onChange={(event) => {
              start(picked(event.currentTarget.files));
              // Allows the user to pick the same files again.
              event.currentTarget.value = "";
            }}
            {...(kind === "data" ? { accept: known?.data_suffixes.join(",") } : { webkitdirectory: "" })}
          />
        </VisuallyHidden>
        <Text size="xs" c="dimmed">
          {kind === "data" ? t("or drop files here") : t("or drop the folder here")}
        </Text>
        {earlier.length > 0 && (
          <NativeSelect
            size="xs"
            ml="auto"
            aria-label={t("Earlier uploads for {{field}}", { field: label })}
            value=""
            onChange={(event) => {
              const one = earlier.find(({ id: known }) => known === event.currentTarget.value);
              if (one !== undefined) onSent(one);
            }}
            data={[
              { value: "", label: t("Use an earlier upload") },
              ...earlier.map((one) => ({ value: one.id, label: `${one.name} · ${bytes(one.size_bytes)}` })),
            ]}
          />
        )}
      </Group>
      {sending.isPending && (
        <Group gap="sm" wrap="nowrap" mt="xs">
          <div className={classes.grow}>
            <Text size="xs" id={id} mb={4}>
              {t("{{name}}: {{sent}} of {{total}}", { name: nameOf(files), sent: bytes(sentBytes), total: bytes(total) })}
            </Text>
            <Progress.Root size="md">
              <Progress.Section value={total === 0 ? 100 : (100 * sentBytes) / total} aria-labelledby={id} />
            </Progress.Root>
          </div>
          <Button size="compact-sm" variant="default" onClick={() => abort.current?.abort()}>
            {t("Cancel upload")}
          </Button>
        </Group>
      )}
      <div aria-live="polite">
        {sending.isSuccess && (
          <Text size="xs" mt="xs">
            {t("{{name}} is on the server.", { name: sending.data.name })}
          </Text>
        )}
        {leftOut.length > 0 && (
          <Text size="xs" c="dimmed" mt="xs">
            {t("Left out, because pickle files are not safe to read: {{names}}", { names: leftOut.join(", ") })}
          </Text>
        )}
        {isAborted && (
          <Text size="xs" mt="xs">
            {t("The upload was cancelled; none of its files are kept.")}
          </Text>
        )}
      </div>
      {sending.error !== null && !isAborted && (
        <Stack mt="xs">
          <Failure error={sending.error} />
        </Stack>
      )}
    </div>
  );
}
