/** The placement picture: a model's layers as one bar, cut into shards, above the machines that hold them. */
import { Text } from "@mantine/core";
import { useState } from "react";

import type { Plan, Pool } from "../api/types";
import { bytes, count, si } from "../format";
import { joined, layerRange, poolShares, ranges } from "./layout";
import classes from "./Placement.module.css";

/** Above this, single layers are thinner than their gaps. */
const MOST_TICKS = 96;

export function Placement({ plan }: { plan: Plan }) {
  const [lit, setLit] = useState<number | null>(null);
  const shares = poolShares(plan);
  return (
    <figure className={classes.figure} aria-label={describe(plan)}>
      <figcaption className={classes.caption}>
        <Text component="span" size="sm">
          {plan.num_layers} layers, {si(plan.parameters, "")} parameters, {plan.pools.length}{" "}
          {plan.pools.length === 1 ? "pool" : "pools"}
        </Text>
        <Text component="span" size="sm" c="dimmed">
          {plan.strategy.replaceAll("_", " ")} · epoch {plan.epoch}
        </Text>
      </figcaption>
      <div className={classes.bar} aria-hidden>
        {plan.pools.map((pool, index) => (
          <div
            key={index}
            className={classes.segment}
            data-hue={index % 6}
            data-dim={lit !== null && lit !== index}
            style={{ flexGrow: shares[index] }}
            onPointerEnter={() => setLit(index)}
            onPointerLeave={() => setLit(null)}
          >
            {plan.num_layers <= MOST_TICKS &&
              Array.from({ length: pool.stop - pool.start }, (_, layer) => <i key={layer} className={classes.layer} />)}
            <span className={classes.range}>{layerRange(pool)}</span>
          </div>
        ))}
      </div>
      <ol className={classes.pools}>
        {plan.pools.map((pool, index) => (
          <PoolCard
            key={index}
            pool={pool}
            index={index}
            isDim={lit !== null && lit !== index}
            onLit={(on) => setLit(on ? index : null)}
          />
        ))}
      </ol>
      {plan.idle.length > 0 && (
        <div>
          <Text size="sm" fw={500}>
            Without work
          </Text>
          <ul className={classes.idle}>
            {plan.idle.map((machine) => (
              <li key={machine.name}>
                <Text size="xs" c="dimmed">
                  {machine.name}: {machine.reason}
                </Text>
              </li>
            ))}
          </ul>
        </div>
      )}
    </figure>
  );
}

interface PoolCardProps {
  pool: Pool;
  index: number;
  isDim: boolean;
  onLit: (on: boolean) => void;
}

function PoolCard({ pool, index, isDim, onLit }: PoolCardProps) {
  return (
    <li
      className={classes.pool}
      data-hue={index % 6}
      data-dim={isDim}
      onPointerEnter={() => onLit(true)}
      onPointerLeave={() => onLit(false)}
    >
      <Text size="sm" fw={600}>
        Pool {index + 1} · {pool.stop - pool.start === 1 ? "layer" : "layers"} {layerRange(pool)}
      </Text>
      <Text size="xs" c="dimmed">
        {si(pool.parameters, "")} parameters
      </Text>
      {pool.members.map((member) => (
        <div key={member.contributor_id} className={classes.member}>
          <Text size="sm" fw={500}>
            {member.name}
          </Text>
          <Text size="xs" c="dimmed">
            needs {bytes(member.memory_bytes)} ·{" "}
            {member.microbatches.length === 1 ? "microbatch" : "microbatches"} {ranges(member.microbatches)}
          </Text>
          <Text size="xs" c="dimmed">
            {member.reason}
          </Text>
        </div>
      ))}
    </li>
  );
}

/** The picture in words, for those who do not see it. */
function describe(plan: Plan): string {
  const pools = plan.pools.map(
    (pool) => `layers ${layerRange(pool)} on ${joined(pool.members.map((member) => member.name))}`,
  );
  return `Placement of ${count(plan.num_layers)} layers: ${pools.join("; ")}`;
}
