/** Events as sentences. */
import type { TFunction } from "i18next";

import type { Measured, Plan, ClusterEvent } from "../../../api/types";
import { capitalized, clause, sentence } from "../../../components/Feedback";
import { bytes, duration, loss, stepTime } from "../../../format";
import { translated } from "../../../i18n/texts";
import { joined, namesOf, ranges } from "../../../placement/layout";
import { formatOf } from "../curves/curves";
import type { RoundMerged } from "../rounds/rounds";
import { METRICS, type EventGroup, type FigureName, type MetricName } from "../search";

export type Tone = "info" | "warning" | "error";

export function toneOf(event: Pick<ClusterEvent, "data">): Tone {
  const { level, outcome, state } = event.data as { level?: Tone; outcome?: string; state?: string };
  if (outcome === "failed" || state === "failed") return "error";
  return level ?? "info";
}

/** The part of the log that an event belongs to. */
export function groupOf({ kind, data }: ClusterEvent): EventGroup {
  if (toneOf({ data }) !== "info") return "notes";
  switch (kind) {
    case "measured":
    case "validated":
    case "target-reached":
    case "layers-timed":
    case "rows":
    case "trials":
    case "round":
    case "traffic":
      return "progress";
    case "sampled":
      return "samples";
    case "checkpoint":
    case "artifact":
    case "link":
    case "trial":
      return "results";
    case "note":
      return "notes";
    default:
      return "plan";
  }
}

export function wordsFor({ kind, data }: ClusterEvent, t: TFunction): string {
  switch (kind) {
    case "state":
      return stateChanged(data as { state: string; reason: string }, t);
    case "planned":
      return planned((data as { plan: Plan }).plan, t);
    case "reformed":
      return reformed(data as { sentence: string; seconds: number; recomputed: number }, t);
    case "started": {
      const { first_step, total_steps } = data as { first_step: number; total_steps: number };
      return t("All machines hold their shards; steps {{first}} to {{last}} begin.", { first: first_step, last: total_steps });
    }
    case "rows": {
      const { done, total, failed } = data as { done: number; total: number; failed: number };
      return failed > 0
        ? t("{{done}} of {{total}} rows are done, {{failed}} with an error.", { done, total, failed })
        : t("{{done}} of {{total}} rows are done.", { done, total });
    }
    case "validated":
      return validated(data as Validated, t);
    case "target-reached": {
      const { step, metric, value, seconds, sent_bytes } = data as Target;
      return t("Target reached at step {{step}}: {{metric}} {{value}}, after {{time}} and {{sent}} sent.", {
        step,
        metric: nameInLog(metric, t),
        value: formatInLog(metric)(value),
        time: duration(seconds),
        sent: bytes(sent_bytes),
      });
    }
    case "sampled": {
      const { step, prompt, text } = data as { step: number; prompt: string; text: string };
      return t("Sample at step {{step}}: “{{prompt}}” continues “{{text}}”.", { step, prompt, text });
    }
    case "trials": {
      const { done, total } = data as { done: number; total: number };
      return t("{{done}} of {{total}} trials are over.", { done, total });
    }
    case "trial": {
      const { number, job, what, reason } = data as { number: number; job: string; what: string; reason: string | null };
      const words = { number, job, what: t(what) };
      return reason === null
        ? t("Trial {{number}} ({{job}}) was {{what}}.", words)
        : t("Trial {{number}} ({{job}}) was {{what}}: {{why}}", { ...words, why: clause(reason) });
    }
    case "checkpoint": {
      const { step, size_bytes } = data as { step: number; size_bytes: number };
      return t("Checkpoint at step {{step}}, {{size}}.", { step, size: bytes(size_bytes) });
    }
    case "artifact": {
      const { name, size_bytes } = data as { name: string; size_bytes: number };
      return t("Artifact {{name}}, {{size}}.", { name, size: bytes(size_bytes) });
    }
    case "measured":
      return measured(data as unknown as Measured, t);
    case "layers-timed": {
      const { step, machines } = data as { step: number; machines: Record<string, unknown> };
      return t("Layers timed up to step {{step}} on {{count}} machines.", { step, count: Object.keys(machines).length });
    }
    case "replan-proposed":
      return t("A better plan: {{what}}", { what: clause((data as { sentence: string }).sentence) });
    case "replan-abandoned":
      return t("The better plan is given up: {{why}}", { why: clause((data as { reason: string }).reason) });
    case "protection":
      return (data as { is_protected: boolean }).is_protected
        ? t("Every layer is on two machines: losing any one of them costs no step.")
        : t("Not protected: a copy of what one machine alone holds was lost.");
    case "round":
      return roundMerged(data as unknown as RoundMerged, t);
    case "traffic":
      return traffic(data as { step: number; machines: Record<string, { sent_bytes: number; received_bytes: number }> }, t);
    case "computation":
    case "ranges-placed":
    case "offended":
    case "link-cut":
      return sentence((data as { sentence: string }).sentence);
    case "labelled": {
      const { tags, group, note } = data as { tags: string[]; group: string | null; note?: string };
      const none = t("none");
      return t("Tags: {{tags}}; group: {{group}}; note: {{note}}.", { tags: tags.join(", ") || none, group: group ?? none, note: note || none });
    }
    case "link": {
      const { link, state, reason } = data as { link: string; state: string; reason: string };
      return t("then.{{link}} {{state}}: {{why}}", { link, state: t(state), why: clause(reason) });
    }
    case "note":
      return sentence((data as { message: string }).message);
    case "ended": {
      const { outcome, reason } = data as { outcome: string; reason: string };
      const why = clause(reason);
      if (reason.startsWith(`${outcome} `)) return t("The attempt ended: {{why}}", { why });
      return t("The attempt {{what}}: {{why}}", { what: outcome === "cancelled" ? t("was cancelled") : t(outcome), why });
    }
    case "cancel-requested":
      return t("Cancelling was asked for.");
    default:
      return `${kind} ${JSON.stringify(data)}`;
  }
}

function stateChanged({ state, reason }: { state: string; reason: string }, t: TFunction): string {
  if (reason === "") return sentence(t(state));
  // "running on 2 machines" contains the state's name.
  return reason.startsWith(`${state} `) ? sentence(reason) : capitalized(t("{{state}}: {{reason}}", { state: t(state), reason: clause(reason) }));
}

type Links = Record<string, { sent_bytes: number; received_bytes: number }>;

function traffic({ step, machines }: { step: number; machines: Links }, t: TFunction): string {
  const links = Object.values(machines);
  const sent = links.reduce((sum, link) => sum + link.sent_bytes, 0);
  const received = links.reduce((sum, link) => sum + link.received_bytes, 0);
  return t("{{count}} machines sent {{sent}} and received {{received}} up to step {{step}}.", {
    count: links.length,
    sent: bytes(sent),
    received: bytes(received),
    step,
  });
}

function roundMerged({ round, step, branches, missing, update_bytes, weight_bytes, consensus_distance }: RoundMerged, t: TFunction): string {
  const losses = branches.flatMap(({ loss }) => (loss === null ? [] : [loss]));
  const mean = losses.reduce((sum, loss) => sum + loss, 0) / losses.length;
  const sent = Math.max(0, ...branches.map(({ sent_bytes }) => sent_bytes));
  return [
    t("Round {{round}} merged {{count}} branches after step {{step}}", { round, step, count: branches.length }),
    losses.length > 0 && t(", loss {{loss}}", { loss: mean.toFixed(4) }),
    t(": each sent {{sent}} and received {{received}}, of {{weights}} of weights.", {
      sent: bytes(sent),
      received: bytes(update_bytes),
      weights: bytes(weight_bytes),
    }),
    missing.length > 0 && t(" Without branch {{branches}}.", { branches: missing.join(", ") }),
    consensus_distance != null && t(" Consensus distance {{distance}}.", { distance: consensus_distance.toPrecision(3) }),
  ]
    .filter((part) => part !== false)
    .join("");
}

function planned(plan: Plan, t: TFunction): string {
  const { branches = [] } = plan;
  if (branches.length === 0) {
    return t("Planned {{layers}} layers in {{count}} stages on {{machines}}.", {
      layers: plan.num_layers,
      count: plan.stages.length,
      machines: joined(namesOf(plan.stages)),
    });
  }
  // Not Map.groupBy, which Node 20 lacks.
  const islands = new Map<string, number[]>();
  for (const { number, stages } of branches) {
    const names = joined(namesOf(stages));
    islands.set(names, [...(islands.get(names) ?? []), number]);
  }
  const parts = [...islands].map(([machines, numbers]) =>
    numbers.length === 1
      ? t("branch {{branches}} on {{machines}}", { branches: ranges(numbers), machines })
      : t("branches {{branches}} on {{machines}}", { branches: ranges(numbers), machines }),
  );
  return t("Planned {{layers}} layers: {{parts}}.", { layers: plan.num_layers, parts: parts.join("; ") });
}

function reformed({ sentence: what, seconds, recomputed }: { sentence: string; seconds: number; recomputed: number }, t: TFunction): string {
  const words = { what: capitalized(translated(what)), time: stepTime(seconds), count: recomputed };
  return recomputed === 0
    ? t("{{what}}; no step for {{time}}.", words)
    : t("{{what}}; no step for {{time}}, {{count}} microbatches computed again.", words);
}

function measured({ measured_step_s, predicted_step_s }: Measured, t: TFunction): string {
  const time = stepTime(measured_step_s);
  return predicted_step_s == null
    ? t("Steps take {{time}}.", { time })
    : t("Steps take {{time}}, predicted {{predicted}}.", { time, predicted: stepTime(predicted_step_s) });
}

/** Keys of `t`. */
const NAME_IN_LOG: Record<MetricName, string> = {
  accuracy: "accuracy",
  top_5_accuracy: "top-5 accuracy",
  f1: "F1",
  auroc: "AUROC",
  rmse: "RMSE",
  mae: "mean absolute error",
  r2: "R²",
  perplexity: "perplexity",
};

/** The name of a metric, preceded by the name of its task: "digit accuracy". */
function nameInLog(metric: string, t: TFunction): string {
  const dot = metric.indexOf(".");
  const name = metric.slice(dot + 1);
  const words = name === "validation_loss" ? t("validation loss") : t(NAME_IN_LOG[name as MetricName] ?? name);
  return dot < 0 ? words : `${metric.slice(0, dot)} ${words}`;
}

function formatInLog(metric: string): (value: number) => string {
  return formatOf(metric.replace("validation_loss", "loss") as FigureName);
}

type Target = { step: number; metric: string; value: number; seconds: number; sent_bytes: number };

type Validated = { split: string; step: number; loss: number; tasks?: Record<string, number> | null } & Partial<Record<MetricName, number | null>>;

function validated(data: Validated, t: TFunction): string {
  const metrics = METRICS.map((name) => [name, data[name]] as const);
  const figures = [...metrics, ...Object.entries(data.tasks ?? {})].flatMap(([name, value]) =>
    value == null ? [] : [`${nameInLog(name, t)} ${formatInLog(name)(value)}`],
  );
  const words = { step: data.step, figures: [t("loss {{loss}}", { loss: loss(data.loss) }), ...figures].join(t(", ")) };
  return data.split === "test" ? t("Final test at step {{step}}: {{figures}}.", words) : t("Validation at step {{step}}: {{figures}}.", words);
}
