/** The last rounds of a job: the times for which each branch computed and waited, and the bytes that it exchanged. */
import { Group, Table, Text } from "@mantine/core";
import type { TFunction } from "i18next";
import { memo, useId, useMemo, useState } from "react";
import { useTranslation } from "react-i18next";

import { TextAlternative } from "../../../components/chart/TextAlternative";
import { useWidth } from "../../../components/chart/useWidth";
import { bytes, count, loss, stepTime } from "../../../format";
import { ageOf, branchesIn, isLate, longestOf, otherSeconds, runsOf, totalsOf, type BranchRound, type Round } from "./rounds";
import classes from "./Rounds.module.css";

const MOST_ROUNDS = 12;
const LABEL_PX = 72;
const AXIS_PX = 22;
/** Space between two rounds. */
const GAP_PX = 6;
/** Width of a round below which only some rounds are numbered on the axis. */
const NUMBER_PX = 34;
/** Smallest ratio that is worth a word. */
const LEAST_RATIO = 1.05;

export const Rounds = memo(function Rounds({ rounds }: { rounds: readonly Round[] }) {
  const { t } = useTranslation();
  const branches = useMemo(() => branchesIn(rounds), [rounds]);
  const totals = useMemo(() => totalsOf(rounds), [rounds]);
  if (rounds.length === 0) {
    return (
      <Text size="sm" c="dimmed">
        {t("The first round is not merged yet.")}
      </Text>
    );
  }
  const { sent_bytes, received_bytes, ratio, computing } = totals;
  const distance = rounds.at(-1)!.consensus_distance;
  const facts = [
    rounds[0]!.is_apart ? t("{{count}} pushes", { count: rounds.length }) : t("{{count}} rounds", { count: rounds.length }),
    t("each branch sent {{sent}} and received {{received}}", { sent: bytes(sent_bytes), received: bytes(received_bytes) }),
    ratio !== null && ratio >= LEAST_RATIO && t("{{ratio}} times less than float32 weights", { ratio: Number(ratio.toPrecision(3)) }),
    computing !== null && t("computing {{share}}% of the time", { share: Math.round(100 * computing) }),
    distance != null && t("consensus distance {{distance}}", { distance: Number(distance.toPrecision(3)) }),
  ];
  const shown = rounds.slice(-MOST_ROUNDS);
  return (
    <div className={classes.holder}>
      <Text size="sm">{facts.filter(Boolean).join(" · ")}</Text>
      <Picture rounds={shown} branches={branches} />
      <Figures rounds={shown} branches={branches} />
    </div>
  );
});

interface Props {
  rounds: readonly Round[];
  branches: readonly number[];
}

function Picture({ rounds, branches }: Props) {
  const { t } = useTranslation();
  const { ref, width } = useWidth<HTMLDivElement>();
  const [lit, setLit] = useState<string | null>(null);
  const hatch = useId();
  const height = branches.length > 12 ? 14 : 24;
  const column = Math.min(160, (width - LABEL_PX) / rounds.length);
  const scale = (column - GAP_PX) / longestOf(rounds);
  const bottom = branches.length * height;
  const every = Math.ceil(NUMBER_PX / column);
  const isApart = rounds[0]!.is_apart;
  const extent = { first: rounds[0]!.round, last: rounds.at(-1)!.round, branches: branches.length };
  const someLate = rounds.some((round) => round.branches.some((run) => isLate(round, run)));
  const isMissing = rounds.some(({ missing }) => missing.length > 0);
  return (
    <figure className={classes.figure}>
      <Group component="figcaption" gap="md" className={classes.legend}>
        <Key name={t("computing")} of="computing" />
        {!isApart && <Key name={t("waiting")} of="waiting" />}
        {!isApart && <Key name={t("exchange and other work")} of="other" />}
        {someLate && <Key name={t("late")} of="late" />}
        {isMissing && <Key name={t("missing")} of="missing" />}
      </Group>
      <div ref={ref}>
        {width > 0 && (
          <svg
            width={width}
            height={bottom + AXIS_PX}
            role="img"
            aria-label={
              isApart
                ? t("Merges {{first}} to {{last}}: computing of {{branches}} branches", extent)
                : t("Rounds {{first}} to {{last}}: computing and waiting of {{branches}} branches", extent)
            }
            onPointerLeave={() => setLit(null)}
            onPointerMove={(event) => setLit((event.target as Element).getAttribute("data-words"))}
          >
            <defs>
              <pattern id={hatch} width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
                <rect width="1.5" height="6" className={classes.hatch} />
              </pattern>
            </defs>
            {branches.map((number, row) => (
              <text key={number} x={0} y={(row + 0.5) * height} className={classes.label} dominantBaseline="central">
                {t("branch {{number}}", { number })}
              </text>
            ))}
            <text x={0} y={bottom + 15} className={classes.tick}>
              {isApart ? t("merge") : t("round")}
            </text>
            {rounds.map((round, place) => (
              <g key={round.round} transform={`translate(${LABEL_PX + place * column} 0)`}>
                {branches.map((number, row) => (
                  <g key={number} transform={`translate(0 ${row * height})`}>
                    <Cell round={round} number={number} width={column - GAP_PX} height={height} scale={scale} hatch={hatch} />
                  </g>
                ))}
                {(rounds.length - 1 - place) % every === 0 && (
                  <text x={(column - GAP_PX) / 2} y={bottom + 15} className={classes.tick} textAnchor="middle">
                    {round.round}
                  </text>
                )}
              </g>
            ))}
          </svg>
        )}
      </div>
      <Text size="sm" c="dimmed" className={classes.lit} aria-hidden>
        {lit ?? t("Point at a bar for its times.")}
      </Text>
    </figure>
  );
}

interface CellProps {
  round: Round;
  number: number;
  width: number;
  height: number;
  /** Pixels of one second. */
  scale: number;
  /** Id of the pattern. */
  hatch: string;
}

/** One branch in one round. Several contributions are stacked. */
function Cell({ round, number, width, height, scale, hatch }: CellProps) {
  const { t } = useTranslation();
  const runs = runsOf(round, number);
  const place = { number, round: round.round };
  const name = round.is_apart ? t("branch {{number}}, merge {{round}}", place) : t("branch {{number}}, round {{round}}", place);
  if (runs.length === 0) {
    // To a parameter server, branches push one after another.
    if (!round.missing.includes(number)) return null;
    return <rect x={1} y={3} width={width - 2} height={height - 6} className={classes.frame} data-of="missing" data-words={`${name}: ${t("missing")}`} />;
  }
  const thick = (height - 4) / runs.length;
  return runs.map((run, nth) => {
    const other = otherSeconds(round, run) ?? 0;
    const [computing, waiting, rest] = [run.seconds * scale, run.waited_s * scale, other * scale];
    const y = 2 + nth * thick;
    return (
      <g key={run.round}>
        <rect x={0} y={y} width={computing} height={thick} className={classes.bar} data-of="computing" />
        <rect x={computing} y={y} width={waiting} height={thick} className={classes.bar} data-of="waiting" />
        <rect x={computing + waiting} y={y} width={rest} height={thick} fill={`url(#${hatch})`} />
        <rect
          x={1}
          y={y + 1}
          width={Math.max(2, computing + waiting + rest - 2)}
          height={thick - 2}
          className={classes.frame}
          data-of={isLate(round, run) ? "late" : undefined}
          data-words={`${name}: ${timesOf(round, run, t).join(", ")}`}
        />
      </g>
    );
  });
}

function timesOf(round: Round, run: BranchRound, t: TFunction): string[] {
  const other = otherSeconds(round, run);
  return [
    ...[markOf(round, run, t)].filter((mark) => mark !== undefined),
    t("computing {{time}}", { time: stepTime(run.seconds) }),
    t("waiting {{time}}", { time: stepTime(run.waited_s) }),
    ...(other === null ? [] : [t("exchange and other work {{time}}", { time: stepTime(other) })]),
  ];
}

/** A mark beside a branch whose contribution is unusual. */
function markOf(round: Round, run: BranchRound | undefined, t: TFunction): string | undefined {
  if (run === undefined) return t("missing");
  if (isLate(round, run)) return t("late, from round {{round}}", { round: run.round });
  const age = ageOf(round, run);
  return age > 0 ? t("weights {{count}} merges old", { count: age }) : undefined;
}

function Key({ name, of }: { name: string; of: string }) {
  return (
    <span className={classes.key}>
      <i data-of={of} aria-hidden />
      {name}
    </span>
  );
}

/** Title of the column with the numbers of merges. */
function mergeIn({ is_apart }: Round, t: TFunction): string {
  return is_apart ? t("Merge") : t("Round");
}

/** The picture as a table, with losses and bytes. */
function Figures({ rounds, branches }: Props) {
  const { t } = useTranslation();
  const merge = mergeIn(rounds[0]!, t);
  return (
    <TextAlternative title={t("The same as a table, with losses and bytes")}>
      <Table className="stacking" verticalSpacing={6} horizontalSpacing="sm" mt="xs">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{merge}</Table.Th>
            <Table.Th>{t("Branch")}</Table.Th>
            <Table.Th className="numeric">{t("Loss")}</Table.Th>
            <Table.Th className="numeric">{t("Sent")}</Table.Th>
            <Table.Th className="numeric">{t("Received")}</Table.Th>
            <Table.Th className="numeric">{t("Computing")}</Table.Th>
            {!rounds[0]!.is_apart && <Table.Th className="numeric">{t("Waiting")}</Table.Th>}
            {!rounds[0]!.is_apart && <Table.Th className="numeric">{t("Exchange, other")}</Table.Th>}
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {rounds.flatMap((round) =>
            branches.flatMap((number) => {
              const runs = runsOf(round, number);
              if (runs.length === 0 && !round.missing.includes(number)) return [];
              return (runs.length === 0 ? [undefined] : runs).map((run) => (
                <Line key={`${round.round} ${number} ${run?.round}`} round={round} number={number} run={run} />
              ));
            }),
          )}
        </Table.Tbody>
      </Table>
    </TextAlternative>
  );
}

/** One contribution, or a branch without one. */
function Line({ round, number, run }: { round: Round; number: number; run: BranchRound | undefined }) {
  const { t } = useTranslation();
  const other = run === undefined ? null : otherSeconds(round, run);
  const mark = markOf(round, run, t);
  return (
    <Table.Tr>
      <Table.Td data-label={mergeIn(round, t)}>
        <span>
          {round.round} · {t("step {{step}}", { step: count(round.step) })}
        </span>
      </Table.Td>
      <Table.Td data-label={t("Branch")}>
        <span>
          {number}
          {mark !== undefined && ` · ${mark}`}
        </span>
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Loss")}>
        <span>{run?.loss == null ? "–" : loss(run.loss)}</span>
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Sent")}>
        <span>{run === undefined ? "–" : bytes(run.sent_bytes)}</span>
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Received")}>
        <span>{run === undefined && round.keeps_own ? "–" : bytes(round.update_bytes)}</span>
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Computing")}>
        <span>{run === undefined ? "–" : stepTime(run.seconds)}</span>
      </Table.Td>
      {!round.is_apart && (
        <Table.Td className="numeric" data-label={t("Waiting")}>
          <span>{run === undefined ? "–" : stepTime(run.waited_s)}</span>
        </Table.Td>
      )}
      {!round.is_apart && (
        <Table.Td className="numeric" data-label={t("Exchange, other")}>
          <span>{other === null ? "–" : stepTime(other)}</span>
        </Table.Td>
      )}
    </Table.Tr>
  );
}
