/** Events as sentences. */
import type { Measured, Plan, ClusterEvent } from "../../../api/types";
import { sentence } from "../../../components/Feedback";
import { bytes, duration, loss, stepTime } from "../../../format";
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

export function wordsFor({ kind, data }: ClusterEvent): string {
  switch (kind) {
    case "state":
      return stateChanged(data as { state: string; reason: string });
    case "planned":
      return planned((data as { plan: Plan }).plan);
    case "reformed":
      return reformed(data as { sentence: string; seconds: number; recomputed: number });
    case "started": {
      const { first_step, total_steps } = data as { first_step: number; total_steps: number };
      return `All machines hold their shards; steps ${first_step} to ${total_steps} begin.`;
    }
    case "rows": {
      const { done, total, failed } = data as { done: number; total: number; failed: number };
      return `${done} of ${total} rows are done${failed > 0 ? `, ${failed} with an error` : ""}.`;
    }
    case "validated":
      return validated(data as Validated);
    case "target-reached": {
      const { step, metric, value, seconds, sent_bytes } = data as Target;
      return `Target reached at step ${step}: ${nameInLog(metric)} ${formatInLog(metric)(value)}, after ${duration(seconds)} and ${bytes(sent_bytes)} sent.`;
    }
    case "sampled": {
      const { step, prompt, text } = data as { step: number; prompt: string; text: string };
      return `Sample at step ${step}: “${prompt}” continues “${text}”.`;
    }
    case "trials": {
      const { done, total } = data as { done: number; total: number };
      return `${done} of ${total} trials are over.`;
    }
    case "trial": {
      const { number, job, what, reason } = data as { number: number; job: string; what: string; reason: string | null };
      return `Trial ${number} (${job}) was ${what}${reason === null ? "" : `: ${reason}`}.`;
    }
    case "checkpoint": {
      const { step, size_bytes } = data as { step: number; size_bytes: number };
      return `Checkpoint at step ${step}, ${bytes(size_bytes)}.`;
    }
    case "artifact": {
      const { name, size_bytes } = data as { name: string; size_bytes: number };
      return `Artifact ${name}, ${bytes(size_bytes)}.`;
    }
    case "measured":
      return measured(data as unknown as Measured);
    case "layers-timed": {
      const { step, machines } = data as { step: number; machines: Record<string, unknown> };
      const count = Object.keys(machines).length;
      return `Layers timed up to step ${step} on ${count} ${count === 1 ? "machine" : "machines"}.`;
    }
    case "replan-proposed":
      return sentence(`a better plan: ${(data as { sentence: string }).sentence}`);
    case "replan-abandoned":
      return sentence(`the better plan is given up: ${(data as { reason: string }).reason}`);
    case "protection":
      return (data as { is_protected: boolean }).is_protected
        ? "Every layer is on two machines: losing any one of them costs no step."
        : "Not protected: a copy of what one machine alone holds was lost.";
    case "round":
      return roundMerged(data as unknown as RoundMerged);
    case "traffic":
      return traffic(data as { step: number; machines: Record<string, { sent_bytes: number; received_bytes: number }> });
    case "ranges-placed":
    case "offended":
    case "link-cut":
      return sentence((data as { sentence: string }).sentence);
    case "labelled": {
      const { tags, group, note } = data as { tags: string[]; group: string | null; note?: string };
      return `Tags: ${tags.join(", ") || "none"}; group: ${group ?? "none"}; note: ${note || "none"}.`;
    }
    case "link": {
      const { link, state, reason } = data as { link: string; state: string; reason: string };
      return `then.${link} ${state}: ${reason}.`;
    }
    case "note":
      // Not capitalized: it may begin with the name of a machine.
      return (data as { message: string }).message;
    case "ended": {
      const { outcome, reason } = data as { outcome: string; reason: string };
      return sentence(`the attempt ${outcome === "cancelled" ? "was cancelled" : outcome}: ${reason}`);
    }
    case "cancel-requested":
      return "Cancelling was asked for.";
    default:
      return `${kind} ${JSON.stringify(data)}`;
  }
}

function stateChanged({ state, reason }: { state: string; reason: string }): string {
  return sentence(reason === "" ? state : `${state}: ${reason}`);
}

function traffic({ step, machines }: { step: number; machines: Record<string, { sent_bytes: number; received_bytes: number }> }): string {
  const links = Object.values(machines);
  const sent = links.reduce((sum, link) => sum + link.sent_bytes, 0);
  const received = links.reduce((sum, link) => sum + link.received_bytes, 0);
  const count = links.length === 1 ? "1 machine" : `${links.length} machines`;
  return `${count} sent ${bytes(sent)} and received ${bytes(received)} up to step ${step}.`;
}

function roundMerged({ round, step, branches, missing, update_bytes, weight_bytes, consensus_distance }: RoundMerged): string {
  const losses = branches.flatMap(({ loss }) => (loss === null ? [] : [loss]));
  const mean = losses.reduce((sum, loss) => sum + loss, 0) / losses.length;
  const sent = Math.max(0, ...branches.map(({ sent_bytes }) => sent_bytes));
  const loss = losses.length === 0 ? "" : `, loss ${mean.toFixed(4)}`;
  const without = missing.length === 0 ? "" : ` Without branch ${missing.join(", ")}.`;
  const apart = consensus_distance == null ? "" : ` Consensus distance ${consensus_distance.toPrecision(3)}.`;
  return `Round ${round} merged ${branches.length} ${branches.length === 1 ? "branch" : "branches"} after step ${step}${loss}: each sent ${bytes(sent)} and received ${bytes(update_bytes)}, of ${bytes(weight_bytes)} of weights.${without}${apart}`;
}

function planned(plan: Plan): string {
  const { branches = [] } = plan;
  if (branches.length === 0) {
    return `Planned ${plan.num_layers} layers in ${plan.stages.length} ${plan.stages.length === 1 ? "stage" : "stages"} on ${joined(namesOf(plan.stages))}.`;
  }
  // Not Map.groupBy, which Node 20 lacks.
  const islands = new Map<string, number[]>();
  for (const { number, stages } of branches) {
    const names = joined(namesOf(stages));
    islands.set(names, [...(islands.get(names) ?? []), number]);
  }
  const parts = [...islands].map(([names, numbers]) => `${numbers.length === 1 ? "branch" : "branches"} ${ranges(numbers)} on ${names}`);
  return `Planned ${plan.num_layers} layers: ${parts.join("; ")}.`;
}

function reformed(data: { sentence: string; seconds: number; recomputed: number }): string {
  const { sentence: what, seconds, recomputed } = data;
  const again = recomputed === 0 ? "" : `, ${recomputed} ${recomputed === 1 ? "microbatch" : "microbatches"} computed again`;
  // Not capitalized: it may begin with the name of a machine.
  return `${what}; no step for ${stepTime(seconds)}${again}.`;
}

function measured({ measured_step_s, predicted_step_s }: Measured): string {
  const took = `Steps take ${stepTime(measured_step_s)}`;
  return predicted_step_s == null ? `${took}.` : `${took}, predicted ${stepTime(predicted_step_s)}.`;
}

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

/** The name of a metric, with that of its task before it: "digit accuracy". */
function nameInLog(metric: string): string {
  const dot = metric.indexOf(".");
  const name = metric.slice(dot + 1);
  const words = name === "validation_loss" ? "validation loss" : (NAME_IN_LOG[name as MetricName] ?? name);
  return dot < 0 ? words : `${metric.slice(0, dot)} ${words}`;
}

function formatInLog(metric: string): (value: number) => string {
  return formatOf(metric.replace("validation_loss", "loss") as FigureName);
}

type Target = { step: number; metric: string; value: number; seconds: number; sent_bytes: number };

type Validated = { split: string; step: number; loss: number; tasks?: Record<string, number> | null } & Partial<Record<MetricName, number | null>>;

function validated(data: Validated): string {
  const extra = METRICS.map((name) => {
    const value = data[name];
    return value == null ? "" : `, ${nameInLog(name)} ${formatInLog(name)(value)}`;
  }).join("");
  const ofTasks = Object.entries(data.tasks ?? {}).map(([name, value]) => `, ${nameInLog(name)} ${formatInLog(name)(value)}`);
  return `${data.split === "test" ? "Final test" : "Validation"} at step ${data.step}: loss ${loss(data.loss)}${extra}${ofTasks.join("")}.`;
}
