/** A sweep: its trials as a picture of parallel coordinates, and as a table, best first. */
import { Table, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import { trials as trialsQuery } from "../../../api/queries";
import type { Job, SweepTrials, Trial } from "../../../api/types";
import { ParallelCoordinates, type CoordinateLine } from "../../../components/chart/ParallelCoordinates";
import { Waiting } from "../../../components/Feedback";
import { Section } from "../../../components/frame/Page";
import { AnchorLink } from "../../../components/links";
import { StateBadge } from "../../../components/StateBadge";
import { count, significant } from "../../../format";
import { translated } from "../../../i18n/texts";
import { nameOfResult } from "../figures";
import { axesOf, drawnAsLogarithms, shortNames, written } from "./parallel";
import classes from "./Sweep.module.css";

const HEIGHT_PX = 220;

export function Sweep({ job }: { job: Job }) {
  const { t } = useTranslation();
  const { data, error, refetch } = useQuery(trialsQuery(job.id));
  if (data === undefined) return <Waiting error={error} refetch={refetch} />;
  return (
    <>
      <Section title={t("Settings and results")}>
        <Coordinates sweep={data} logarithms={drawnAsLogarithms(job.spec)} />
      </Section>
      <Section title={t("Trials")}>
        <Trials sweep={data} />
      </Section>
    </>
  );
}

/** One line for each trial, from axis to axis; the table below has the same values. */
function Coordinates({ sweep, logarithms }: { sweep: SweepTrials; logarithms: readonly string[] }) {
  const { t } = useTranslation();
  const [lit, setLit] = useState<number | null>(null);
  const metric = nameOfResult(sweep.metric);
  const lines = sweep.trials.map((trial): CoordinateLine => {
    const look = trial.number === sweep.best ? "best" : trial.is_stopped ? "stopped" : trial.value === null ? "open" : undefined;
    return {
      id: String(trial.number),
      values: [...sweep.fields.map((field) => trial.settings[field]), trial.value],
      words: wordsOf(trial, sweep, t("trial {{number}}", { number: trial.number })),
      ...(look !== undefined && { look }),
    };
  });
  return (
    <figure className={classes.figure}>
      <figcaption>
        <Text size="sm" c="dimmed">
          {t("Each line is a trial. On the axis to the right, better values are higher; dashed trials were stopped early. The arrow keys go from line to line.")}
        </Text>
      </figcaption>
      <ParallelCoordinates
        axes={axesOf(sweep, logarithms)}
        names={[...shortNames(sweep.fields), metric]}
        lines={lines}
        height={HEIGHT_PX}
        label={t("Settings and results")}
        description={t("Settings and {{metric}} of {{number}} trials; the best is trial {{best}}", {
          metric,
          number: sweep.trials.filter((trial) => trial.value !== null).length,
          best: sweep.best ?? "–",
        })}
        hint={t("Point at a line to see its trial.")}
        lit={lit}
        onLight={setLit}
      />
    </figure>
  );
}

function wordsOf(trial: Trial, sweep: SweepTrials, name: string): string {
  const names = shortNames(sweep.fields);
  const settings = sweep.fields.map((field, place) => `${names[place]} ${written(trial.settings[field])}`);
  const value = trial.value === null ? [] : [`${nameOfResult(sweep.metric)} ${written(trial.value)}`];
  return `${name}: ${[...settings, ...value].join(", ")}`;
}

function Trials({ sweep }: { sweep: SweepTrials }) {
  const { t } = useTranslation();
  const names = shortNames(sweep.fields);
  const metric = nameOfResult(sweep.metric);
  return (
    <div className="card scroll">
      <Table className="stacking" verticalSpacing="xs" horizontalSpacing="md">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Trial")}</Table.Th>
            <Table.Th>{t("State")}</Table.Th>
            <Table.Th className="numeric">{t("Steps")}</Table.Th>
            <Table.Th className="numeric">{metric}</Table.Th>
            {sweep.fields.map((field, place) => (
              <Table.Th key={field} className="numeric" title={field}>
                {names[place]}
              </Table.Th>
            ))}
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {sweep.trials.map((trial) => (
            <Table.Tr key={trial.number}>
              <Table.Th scope="row" className={classes.trial}>
                <Name trial={trial} />
                {trial.number === sweep.best && ` · ${t("best")}`}
              </Table.Th>
              <Table.Td data-label={t("State")} title={translated(trial.reason)}>
                {trial.state === null ? "–" : <StateBadge state={trial.is_stopped && trial.state === "cancelled" ? "stopped" : trial.state} />}
              </Table.Td>
              <Table.Td data-label={t("Steps")} className="numeric">{trial.job_id === null ? "–" : `${count(trial.step)} / ${count(trial.total_steps)}`}</Table.Td>
              <Table.Td data-label={metric} className="numeric">{trial.value === null ? "–" : significant(trial.value, 4)}</Table.Td>
              {sweep.fields.map((field, place) => (
                <Table.Td key={field} data-label={names[place]} className="numeric">
                  {written(trial.settings[field])}
                </Table.Td>
              ))}
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}

function Name({ trial }: { trial: Trial }) {
  const { t } = useTranslation();
  const name = t("trial {{number}}", { number: trial.number });
  if (trial.job_id === null) return name;
  return (
    <AnchorLink to="/jobs/$jobId" params={{ jobId: trial.job_id }} size="sm">
      {name}
    </AnchorLink>
  );
}
