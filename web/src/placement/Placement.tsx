/** The placement picture: a model's layers as a bar that is cut into shards, above the machines that hold them. */
import { NativeSelect, SegmentedControl, Text, VisuallyHidden } from "@mantine/core";
import type { TFunction } from "i18next";
import { memo, useId, useMemo, useState, type ReactNode } from "react";
import { useTranslation } from "react-i18next";

import type { Branch, Plan } from "../api/types";
import { count, si } from "../format";
import { Details, figuresOf, workWords } from "./Details";
import { Idle } from "./Idle";
import { joined, layerRange, namesOf, planOfBranch, stageShares, type Block, type Size } from "./layout";
import type { Work } from "./live";
import { usePhase } from "./phases";
import { MemberTable } from "./MemberTable";
import classes from "./Placement.module.css";
import { useBlocks } from "./useBlocks";

/** Above this number, layers are thinner than the gaps between them. */
const MOST_TICKS = 200;
/** Maximum number of machines named in the choice of a branch. */
const MOST_NAMES = 4;

/** How a machine left: it belongs to an earlier plan, or to this plan and will be replaced. */
export type Departure = "lost" | "left";

/** The placement of a job that runs. */
export interface Live {
  /** How each machine went, by id. */
  departures: ReadonlyMap<string, Departure>;
  /** Measured work by id of the machine. */
  work: ReadonlyMap<string, Work>;
  /** Drawn over the bar of the layers. */
  beat: ReactNode;
  /** Shown while no machine is pointed at. */
  note: ReactNode;
}

interface Props {
  plan: Plan;
  /** If set, another part of the page shows the table of members and the idle machines. */
  live?: Live | undefined;
}

export const Placement = memo(function Placement({ plan, live }: Props) {
  const { t } = useTranslation();
  const [size, setSize] = useState<Size>("layers");
  const [chosen, setChosen] = useState<number | null>(null);
  const branch = plan.branches.find(({ number }) => number === chosen) ?? plan.branches[0];
  const drawn = useMemo(() => (branch === undefined ? plan : planOfBranch(plan, branch)), [plan, branch]);

  return (
    <figure className={classes.figure} aria-label={describe(drawn, branch)}>
      <figcaption className={classes.caption}>
        <Text size="xs" c="dimmed">
          {t("{{count}} layers", { count: plan.num_layers })}, {t("{{number}} parameters", { number: si(plan.parameters, "") })},{" "}
          {t("{{count}} stages", { count: drawn.stages.length })} · {plan.strategy.replaceAll("_", " ")} ·{" "}
          {t("epoch {{epoch}}", { epoch: plan.epoch })}
        </Text>
        {branch !== undefined && (
          <NativeSelect
            size="xs"
            className={classes.branch!}
            aria-label={t("Branch")}
            value={branch.number}
            onChange={(event) => setChosen(Number(event.currentTarget.value))}
            data={plan.branches.map((one) => ({
              value: String(one.number),
              label: t("branch {{number}}: {{machines}}", { number: one.number, machines: shortened(namesOf(one.stages)) }),
            }))}
          />
        )}
        <SegmentedControl
          size="xs"
          aria-label={t("Width by")}
          value={size}
          onChange={(value) => setSize(value as Size)}
          data={[
            { value: "layers", label: t("layers") },
            { value: "memory", label: t("memory") },
          ]}
        />
      </figcaption>
      {/* The key resets the picture, because choosing a branch is not a change of membership. */}
      <Picture key={branch?.number} plan={drawn} size={size} live={live} hasPhases={live !== undefined && branch === plan.branches[0]} />
      {live === undefined && (
        <>
          <MemberTable plan={plan} />
          <Idle machines={plan.idle} />
        </>
      )}
    </figure>
  );
});

/** The bar, its machines, and the figures of one of them. */
function Picture({ plan, size, live, hasPhases }: Props & { size: Size; hasPhases: boolean }) {
  const { t } = useTranslation();
  const [lit, setLit] = useState<string | null>(null);
  const shown = useBlocks(plan, size);
  const prefix = useId();
  const shares = stageShares(plan, size);
  const current = shown.blocks.find((block) => block.id === lit);
  const departed = (id: string) => live?.departures.get(id);
  const missing = shown.blocks.filter((block) => departed(block.id) !== undefined);

  function move(event: React.KeyboardEvent) {
    const next = neighbour(shown.blocks, current, event.key);
    if (next === undefined) return;
    event.preventDefault();
    setLit(next.id);
  }

  return (
    <>
      <div className={classes.bar} aria-hidden>
        {plan.stages.map((stage, index) => (
          <div
            key={index}
            className={classes.segment}
            data-hue={index % 6}
            data-lit={current?.stage === index}
            style={{ flexGrow: shares[index] }}
          >
            {plan.num_layers <= MOST_TICKS &&
              Array.from({ length: stage.stop - stage.start }, (_, layer) => <i key={layer} className={classes.layer} />)}
            <span className={classes.range}>
              {layerRange(stage)}
              {hasPhases && <PhaseSign stage={index} />}
            </span>
          </div>
        ))}
        {live?.beat}
      </div>
      <div
        className={classes.machines}
        style={{ height: shown.height }}
        role="listbox"
        aria-orientation="horizontal"
        aria-label={t("Machines of this plan")}
        tabIndex={0}
        aria-activedescendant={current && `${prefix}${current.id}`}
        onKeyDown={move}
        onFocus={() => lit === null && setLit(shown.blocks[0]?.id ?? null)}
        onBlur={() => setLit(null)}
        onPointerLeave={() => setLit(null)}
      >
        {shown.blocks.map((block) => {
          const { id, name } = block;
          const work = live?.work.get(id);
          const departure = departed(id);
          const facts = departure === undefined ? [...workWords(work, t), ...figuresOf(plan, block, t)] : [departureText(departure, t)];
          return (
            <div
              key={id}
              id={`${prefix}${id}`}
              role="option"
              aria-selected={id === lit}
              className={departure === undefined ? classes.block : classes.missing}
              data-hue={block.stage % 6}
              data-lit={id === lit}
              data-new={shown.come.has(id)}
              style={place(block)}
              onPointerEnter={() => setLit(id)}
            >
              {departure === undefined ? (
                <Meter work={work} predicted={plan.stages[block.stage]?.members[block.seat]?.busy_fraction} block={block} />
              ) : (
                <span className={classes.name} data-flat={block.height < 24} aria-hidden>
                  {name} · {departureText(departure, t)}
                </span>
              )}
              <VisuallyHidden>{`${name}: ${facts.join(", ")}`}</VisuallyHidden>
            </div>
          );
        })}
        {shown.gone.map((block) => (
          <div key={`gone ${block.id}`} className={classes.gone} style={place(block)} aria-hidden>
            <span className={classes.name} data-flat={block.height < 24}>
              {block.name} · {departureText(departed(block.id), t)}
            </span>
          </div>
        ))}
      </div>
      <Details plan={plan} block={current} work={current && live?.work.get(current.id)} note={live?.note} />
      <VisuallyHidden role="status">
        {[...missing, ...shown.gone].map((block) => `${block.name}: ${departureText(departed(block.id), t)}. `)}
      </VisuallyHidden>
    </>
  );
}

/** The phase of the stage at this moment of the step that the timeline plays: ▶ forward, ◀ backward, ● update. */
function PhaseSign({ stage }: { stage: number }) {
  const phase = usePhase(stage);
  return phase === undefined ? null : <i className={classes.phase}>{{ F: "▶", B: "◀", update: "●", waiting: "" }[phase]}</i>;
}

/** The name of a machine over a meter of the time in which it computes; a mark shows the plan's prediction. */
function Meter({ work, predicted, block }: { work: Work | undefined; predicted: number | null | undefined; block: Block }) {
  const computing = work?.computing ?? null;
  return (
    <>
      {computing !== null && <i className={classes.level} style={{ width: `${100 * computing}%` }} />}
      {computing !== null && predicted != null && <i className={classes.predicted} style={{ insetInlineStart: `${100 * predicted}%` }} />}
      {/* The hidden text of the block states all of this. */}
      <span className={classes.name} data-flat={block.height < 24} aria-hidden>
        <span className={classes.label}>{block.name}</span>
        {computing !== null && <span className={classes.share}>{Math.round(100 * computing)}%</span>}
        {work?.sentBytesPerS != null && work.receivedBytesPerS != null && (
          <span className={classes.rates}>
            ↑&nbsp;{si(work.sentBytesPerS, "B/s")} ↓&nbsp;{si(work.receivedBytesPerS, "B/s")}
          </span>
        )}
      </span>
    </>
  );
}

function departureText(departure: Departure | undefined, t: TFunction): string {
  if (departure === undefined) return t("gone");
  return departure === "lost" ? t("lost") : t("left");
}

function place({ left, width, top, height }: Block): React.CSSProperties {
  return { left: `${100 * left}%`, width: `${100 * width}%`, top, height };
}

/** The machine to which an arrow key moves: across stages, or up and down within one. */
function neighbour(blocks: readonly Block[], from: Block | undefined, key: string): Block | undefined {
  if (key === "Home" || from === undefined) return key.startsWith("Arrow") || key === "Home" ? blocks[0] : undefined;
  if (key === "End") return blocks.at(-1);
  if (key === "ArrowUp" || key === "ArrowDown") {
    const seat = from.seat + (key === "ArrowDown" ? 1 : -1);
    return blocks.find((block) => block.stage === from.stage && block.seat === seat) ?? from;
  }
  if (key !== "ArrowLeft" && key !== "ArrowRight") return undefined;
  const stage = from.stage + (key === "ArrowRight" ? 1 : -1);
  const there = blocks.filter((block) => block.stage === stage);
  return there[Math.min(from.seat, there.length - 1)] ?? from;
}

/** The text alternative of the picture. */
function describe(plan: Plan, branch: Branch | undefined): string {
  const stages = plan.stages.map(
    (stage) => `layers ${layerRange(stage)} on ${joined(stage.members.map((member) => member.name))}`,
  );
  const where = branch === undefined ? "" : `, branch ${branch.number}`;
  return `Placement of ${count(plan.num_layers)} layers${where}: ${stages.join("; ")}`;
}

function shortened(names: readonly string[]): string {
  return names.length > MOST_NAMES ? `${names.slice(0, MOST_NAMES).join(", ")}, …` : names.join(", ");
}
