/**
 * Decides which fields are visible and which are folded. Fields of the schema that are not named here are folded under
 * "More" in the last part, so that a new field is always reachable.
 */
import type { Field } from "./schema";
import { find } from "./schema";

export interface Fold {
  title: string;
  fields: readonly string[];
}

export interface Section extends Fold {
  folds: readonly Fold[];
}

const LABELS = { title: "Tags and group", fields: ["tags", "group"] };
const PLAIN = { title: "Model", fields: ["name", "task", "model"], folds: [] };
const MODEL = { ...PLAIN, folds: [{ title: "Several tasks", fields: ["tasks"] }, LABELS] };
const ANSWERER = { title: "Model", fields: ["name", "deployment", "model"], folds: [{ title: "Machines", fields: ["parallelism"] }, LABELS] };

const LAYOUTS: Record<string, readonly Section[]> = {
  train: [
    MODEL,
    {
      title: "Data",
      fields: ["data.files", "data.dataset"],
      folds: [
        {
          title: "Tables, images and labels",
          fields: ["data.table", "data.images", "data.labels", "data.pairs", "data.transforms"],
        },
        { title: "Columns, validation and test", fields: ["data"] },
        { title: "Tokenizer", fields: ["tokenizer"] },
      ],
    },
    {
      title: "Training",
      fields: [
        "training.steps",
        "training.batch_size",
        "training.sequence_length",
        "training.optimizer.name",
        "training.optimizer.learning_rate",
      ],
      folds: [
        { title: "Optimizer and schedule", fields: ["training.loss", "training.optimizer", "training.schedule", "training.max_gradient_norm"] },
        {
          title: "Validation, checkpoints and samples",
          fields: [
            "training.validate_every",
            "training.early_stopping",
            "training.target",
            "training.checkpoint_every",
            "training.checkpoints_kept",
            "training.samples",
          ],
        },
        {
          title: "Slow links",
          fields: ["training.synchronization", "training.collective", "training.compression", "training.boundary_compression"],
        },
        { title: "Trained parameters", fields: ["training.lora", "training.freeze"] },
        { title: "Buckets of gradients and weights", fields: ["training.communication_fusion"] },
        { title: "Precision, memory and seed", fields: ["training"] },
      ],
    },
    {
      title: "Machines and what follows",
      fields: [],
      folds: [
        { title: "Placement of the model on the machines", fields: ["parallelism"] },
        { title: "Serve the result", fields: ["then.serve"] },
        { title: "Answer rows with the result", fields: ["then.generate"] },
      ],
    },
  ],
  generate: [
    ANSWERER,
    { title: "Data", fields: ["data.files", "data.prompt", "data.messages"], folds: [] },
    {
      title: "Answers",
      fields: ["sampling.max_tokens", "sampling.temperature"],
      folds: [
        { title: "How answers are drawn", fields: ["sampling"] },
        {
          title: "Single tokens",
          fields: ["sampling.logit_bias", "sampling.stop_token_ids", "sampling.min_tokens", "sampling.skip_special_tokens"],
        },
        { title: "Output", fields: ["output", "concurrency"] },
      ],
    },
  ],
  embed: [
    ANSWERER,
    { title: "Data", fields: ["data.files", "data.text"], folds: [{ title: "Output", fields: ["output", "concurrency"] }] },
  ],
  sparse: [
    { title: "Model", fields: ["name", "model"], folds: [LABELS] },
    {
      title: "Data",
      fields: ["data.format", "data.files"],
      folds: [{ title: "Columns, validation and test", fields: ["data"] }],
    },
    {
      title: "Training",
      fields: ["training.passes", "training.batch_size", "training.learning_rate"],
      folds: [
        { title: "Workers and servers", fields: ["training.workers", "training.servers", "training.staleness", "training.hogwild_threads"] },
        { title: "Messages", fields: ["training.threshold", "training.values"] },
        { title: "Precision, memory and seed", fields: ["training"] },
        { title: "Machines", fields: ["parallelism"] },
      ],
    },
  ],
  sweep: [
    { title: "Search", fields: ["name", "fields", "search", "metric"], folds: [LABELS, { title: "Budget and early stopping", fields: ["goal", "early_stopping", "jobs_at_once", "time_limit_s"] }] },
    { title: "Job of the trials", fields: ["job.model", "job.data.dataset", "job.data.files", "job.training.steps", "job.training.validate_every"], folds: [{ title: "All fields of the job", fields: ["job"] }] },
  ],
  serve: [
    PLAIN,
    {
      title: "Size",
      fields: ["replicas", "max_seq", "max_concurrent"],
      folds: [
        {
          title: "Objective for choosing machines",
          fields: ["objective", "prompt_tokens", "new_tokens", "first_token_limit_s", "next_token_limit_s"],
        },
        { title: "Precision and machines", fields: ["dtype", "parallelism"] },
        { title: "Answers", fields: ["tool_format"] },
      ],
    },
  ],
};

/** A part of the form with its fields. */
export interface Part {
  title: string;
  fields: readonly Field[];
  folds: readonly Part[];
}

/**
 * Lay out the fields of a job. The name of an object, `training`, includes those of its fields that belong to no other
 * part.
 */
export function layOut(root: Field, kind: string): Part[] {
  const sections = LAYOUTS[kind] ?? [];
  const named = new Set(sections.flatMap((section) => [section, ...section.folds].flatMap((part) => part.fields)));
  const isElsewhere = (field: Field, by: string): boolean => named.has(field.path.join(".")) && field.path.join(".") !== by;

  /** The field without subfields that are shown elsewhere; undefined if none is left. */
  const rest = (field: Field, by: string): Field | undefined => {
    if (isElsewhere(field, by)) return undefined;
    if (![...named].some((name) => name.startsWith(`${field.path.join(".")}.`))) return field;
    const fields = field.fields.map((one) => rest(one, by)).filter((one) => one !== undefined);
    // Its alternatives are shown with its fields.
    return fields.length === 0 ? undefined : { ...field, fields, exactlyOne: [] };
  };
  const fieldsOf = (part: Fold): Field[] =>
    part.fields
      .map((name) => find(root, name.split(".")))
      .filter((field) => field !== undefined)
      .map((field) => rest(field, field.path.join(".")))
      .filter((field) => field !== undefined);

  const parts: Part[] = sections.map((section) => ({
    title: section.title,
    fields: fieldsOf(section),
    folds: section.folds.map((fold) => ({ title: fold.title, fields: fieldsOf(fold), folds: [] })),
  }));
  const isNamed = (field: Field) => [...named].some((name) => name === field.path[0] || name.startsWith(`${field.path[0]}.`));
  const more = root.fields.filter((field) => !isNamed(field));
  const last = parts.at(-1);
  if (more.length === 0 || last === undefined) return parts;
  return [...parts.slice(0, -1), { ...last, folds: [...last.folds, { title: "More", fields: more, folds: [] }] }];
}
