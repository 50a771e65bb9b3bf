import { Table, Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { QueuedJob } from "../../api/types";
import { sentence } from "../../components/Feedback";
import { AnchorLink } from "../../components/links";
import { count, dateAndTime, duration } from "../../format";
import { useNow } from "../../useNow";

/** Jobs that the list shows. */
const MOST = 50;

/** The first jobs in the queue, in the order in which they get machines. */
export function Queue({ jobs }: { jobs: readonly QueuedJob[] }) {
  const { t } = useTranslation();
  const now = useNow(jobs.length > 0);
  if (jobs.length === 0) {
    return (
      <Text size="sm" c="dimmed">
        {t("No job waits.")}
      </Text>
    );
  }
  return (
    <div className="scroll">
      <Table className="stacking" verticalSpacing="xs">
        <Table.Thead>
          <Table.Tr>
            <Table.Th w={1} style={{ whiteSpace: "nowrap" }}>{t("Place")}</Table.Th>
            <Table.Th>{t("Job")}</Table.Th>
            <Table.Th>{t("Why it waits")}</Table.Th>
            <Table.Th className="numeric">{t("Attempt")}</Table.Th>
            <Table.Th className="numeric">{t("Waits for")}</Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {jobs.slice(0, MOST).map((job, index) => (
            <Table.Tr key={job.id}>
              <Table.Td data-label={t("Place")}>
                {count(index + 1)}
              </Table.Td>
              <Table.Td data-label={t("Job")}>
                <AnchorLink to="/jobs/$jobId" params={{ jobId: job.id }} size="sm" fw={600}>
                  {job.name}
                </AnchorLink>
              </Table.Td>
              <Table.Td data-label={t("Why it waits")}>
                <Text size="sm">{sentence(job.reason)}</Text>
              </Table.Td>
              <Table.Td className="numeric" data-label={t("Attempt")}>
                {count(job.attempt)}
              </Table.Td>
              <Table.Td className="numeric" data-label={t("Waits for")}>
                <time dateTime={job.waiting_since} title={dateAndTime(job.waiting_since)}>
                  {duration(Math.max(0, Math.round((now - Date.parse(job.waiting_since)) / 1000)))}
                </time>
              </Table.Td>
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
      {jobs.length > MOST && (
        <AnchorLink to="/jobs" search={{ state: "queued" }} size="sm">
          {t("The first {{shown}} of {{all}} queued jobs; the list of jobs has all", { shown: count(MOST), all: count(jobs.length) })}
        </AnchorLink>
      )}
    </div>
  );
}
