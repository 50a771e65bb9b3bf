/** The first rows of the job's data, as training would read them; shown on demand. */
import { Button, Group, Stack, Text } from "@mantine/core";
import { useMutation } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { previewData } from "../../api/submit";
import type { JobPreview } from "../../api/types";
import { Failure } from "../../components/Feedback";
import { Section } from "../../components/frame/Page";
import { significant } from "../../format";
import classes from "./DataPreview.module.css";

type Preview = JobPreview["tasks"][number]["data"];
type Cell = Preview["rows"][number][number];

export function DataPreview({ text }: { text: string }) {
  const { t } = useTranslation();
  const preview = useMutation({ mutationFn: async () => ({ of: text, found: await previewData(text) }) });
  const { data, error } = preview;
  return (
    <Section
      title={t("First rows of the data")}
      actions={
        <Button size="xs" variant="default" loading={preview.isPending} onClick={() => preview.mutate()}>
          {data === undefined ? t("Show") : t("Read again")}
        </Button>
      }
    >
      {error !== null ? (
        <Failure error={error} />
      ) : data === undefined ? (
        <Text size="sm" c="dimmed">
          {t("Shows ten rows as training would read them, with the types of the columns.")}
        </Text>
      ) : (
        <Stack gap="md" data-stale={data.of !== text}>
          {data.of !== text && (
            <Text size="xs" c="dimmed" role="status">
              {t("The job has changed since these rows were read.")}
            </Text>
          )}
          {data.found.tasks.map(({ task, data: rows }) => (
            <PreviewTable key={task ?? ""} task={task ?? undefined} preview={rows} />
          ))}
        </Stack>
      )}
    </Section>
  );
}

/** One table of rows. */
export function PreviewTable({ task, preview }: { task: string | undefined; preview: Preview }) {
  const { t } = useTranslation();
  const kinds = { number: t("number"), category: t("category"), class: t("class"), text: t("text"), image: t("image") };
  const { columns, rows, left_out: leftOut = 0 } = preview;
  const caption = task === undefined ? t("Rows of the first file") : t("Rows of the first file of task {{task}}", { task });
  return (
    <div>
      <div className={classes.scroll} tabIndex={0} role="region" aria-label={caption}>
        <table className={classes.table}>
          <caption>{caption}</caption>
          <thead>
            <tr>
              {columns.map(({ name, kind, is_target: isTarget }) => (
                <th key={name} scope="col" data-kind={kind}>
                  {name}
                  <span className={classes.kind}>{isTarget ? t("{{kind}}, target", { kind: kinds[kind] }) : kinds[kind]}</span>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((row, place) => (
              <tr key={place}>
                {row.map((cell, column) => (
                  <td key={column} data-kind={columns[column]?.kind}>
                    <Value cell={cell} kind={columns[column]?.kind} label={t("image of row {{number}}", { number: place + 1 })} />
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {leftOut > 0 && (
        <Group>
          <Text size="xs" c="dimmed">
            {t("{{count}} more features", { count: leftOut })}
          </Text>
        </Group>
      )}
    </div>
  );
}

function Value({ cell, kind, label }: { cell: Cell; kind: Preview["columns"][number]["kind"] | undefined; label: string }) {
  if (cell === null) return "–";
  if (kind === "image") return <img src={`data:image/png;base64,${cell}`} alt={label} className={classes.image} />;
  return typeof cell === "number" ? written(cell) : cell;
}

/** A number, as `share-compute preview-data` prints it: with six digits, or with all digits of its whole part. */
export function written(value: number): string {
  return String(Number.isInteger(value) ? value : Number(significant(value, 6)));
}
