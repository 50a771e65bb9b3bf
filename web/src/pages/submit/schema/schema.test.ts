import { readFileSync } from "node:fs";
import { join } from "node:path";

import { expect, test } from "vitest";

import { Draft, readShort, short } from "../draft";
import { textOf } from "../starts/earlier";
import { usable } from "../uploads/files";
import chinese from "./fieldWords.zh.json";
import { layOut, type Part } from "./layout";
import { placed } from "./problems";
import { find, pruned, readSchema, type Field, type Schema } from "./schema";

/** The request schemas that the server publishes in its OpenAPI document. */
const schemas = (
  JSON.parse(readFileSync(join(__dirname, "../../../../openapi.json"), "utf-8")) as { components: { schemas: Record<string, Schema> } }
).components.schemas;
const read = (name: string) => readSchema({ ...schemas[name]!, $defs: schemas });
const train = read("JobRequest");
const roots = { train, generate: read("GenerateJobRequest"), embed: read("EmbedJobRequest"), sparse: read("SparseJobRequest"), sweep: read("SweepJobRequest"), serve: read("DeploymentRequest") };

const leaves = (field: Field): Field[] =>
  field.kind === "object" || field.kind === "rows" ? [field, ...field.fields.flatMap(leaves)] : [field];

test("fields have the input that fits them", () => {
  const kind = (path: string) => find(train, path.split("."))?.kind;
  expect(kind("training.steps")).toBe("number");
  expect(kind("training.microbatches")).toBe("number");
  expect(kind("training.optimizer.name")).toBe("choice");
  expect(kind("training.optimizer.betas")).toBe("yaml");
  expect(kind("data.files")).toBe("paths");
  expect(kind("data.shuffle")).toBe("boolean");
  expect(kind("model.path")).toBe("path");
  expect(kind("model.layers")).toBe("rows");
  expect(kind("model.config")).toBe("yaml");
  expect(kind("training.freeze")).toBe("strings");
  expect(find(train, ["training", "lora"])).toMatchObject({ kind: "object", isNullable: true });
  expect(find(train, ["model"])?.exactlyOne).toEqual(["path", "hub", "config", "layers"]);
  expect(find(roots.serve, ["name"])?.isRequired).toBe(true);
});

test("alternatives are chosen by their tag, and a default that differs is none", () => {
  const at = (path: string) => find(train, path.split("."));
  expect(at("training.synchronization")).toMatchObject({ kind: "object", tag: "kind" });
  expect(at("training.synchronization.kind")?.choices).toEqual(["allreduce", "auto", "elastic", "gossip", "local", "parameter_server"]);
  expect(at("training.synchronization.every")).toMatchObject({ only: ["auto", "elastic", "gossip", "local", "parameter_server"] });
  expect(at("training.synchronization.every")?.fallback).toBeUndefined(); // each policy has its own
  expect(at("training.synchronization.rate")).toMatchObject({ only: ["elastic"], fallback: 0.1 });
  expect(at("training.synchronization.outer.learning_rate")?.fallback).toBeUndefined();
  expect(at("training.compression.density")?.only).toEqual(["topk"]);
  const kept = { training: { synchronization: { kind: "local", branches: 4, late: "merge", outer: { name: "sgd", learning_rate: 0.4 } }, compression: { name: "none" } } };
  expect(pruned(kept, train)).toEqual({
    training: { synchronization: { kind: "local", branches: 4, outer: { name: "sgd", learning_rate: 0.4 } } },
  });
});

test.each(Object.entries(roots))("every field of %s stands in the form once", (kind, root) => {
  const inParts = (part: Part): Field[] => [...part.fields.flatMap(leaves), ...part.folds.flatMap(inParts)];
  const shown = layOut(root, kind)
    .flatMap(inParts)
    .filter((field) => field.kind !== "object")
    .map((field) => field.path.join("."));
  const all = root.fields.flatMap(leaves).filter((field) => field.kind !== "object");
  expect(shown.sort()).toEqual(all.map((field) => field.path.join(".")).sort());
});

test("the form changes the text in its place and keeps comments", () => {
  const text = "# mine\nname: a\ntraining:\n  steps: 5 # few\n  optimizer: {name: adam, learning_rate: 1e-3}\n";
  const next = new Draft(text).with(["training", "optimizer", "name"], "sgd");
  expect(next).toBe(text.replace("adam", "sgd"));
  expect(new Draft(next).with(["data", "files"], ["a.txt"])).toBe(`${next}data:\n  files:\n    - a.txt\n`);
  expect(new Draft("training:\n").with(["training", "steps"], 3)).toBe("training: {steps: 3}\n".replace("{steps: 3}", "\n  steps: 3").replace(" \n", "\n"));
});

test("what is taken out leaves no empty mapping behind", () => {
  expect(new Draft("name: a\nmodel:\n  path: /x\n").without(["model", "path"])).toBe("name: a\n");
  expect(new Draft("").with(["name"], "a")).toBe("name: a\n");
});

test("broken YAML has no value", () => {
  expect(new Draft("a: [1").value).toBe(null);
  expect(new Draft("- a").value).toBe(null);
});

test("values are written short and read back", () => {
  for (const value of [{ min_lr_rate: 0.1 }, [0.9, 0.95], 3, "0..4", { a: [1, 2] }]) expect(readShort(short(value))).toEqual(value);
  expect(readShort("{a: ")).toBe("{a: ");
});

test("problems stand at the deepest field that the form has", () => {
  const at = placed(
    [
      { field: "training.steps", problem: "too small" },
      { field: "data.files.1", problem: "no file" },
      { field: "model.layers.1.type", problem: "unknown" },
      { field: "training", problem: "do not fit" },
      { field: "nonsense", problem: "no" },
    ],
    train,
  );
  expect(Object.fromEntries(at)).toEqual({
    "training.steps": ["too small"],
    "data.files": ["no file"],
    "model.layers": ["1.type: unknown"],
    training: ["do not fit"],
    "": ["nonsense: no"],
  });
});

test("an earlier job is started from without its defaults, and names uploads", () => {
  const root = { ...train, fields: train.fields };
  const spec = {
    kind: "train",
    name: "mine",
    model: { path: "/srv/data/uploads/up-1/files", config: null, layers: null },
    data: { files: ["/srv/data/uploads/up-2/files/a.txt", "/elsewhere.txt"], dataset: null, shuffle: true },
    tokenizer: { path: null, vocab_size: null },
    training: { steps: 7, batch_size: 16, optimizer: { name: "adamw", learning_rate: 0.001 } },
  };
  expect(pruned(spec.tokenizer, find(root, ["tokenizer"])!)).toBe(undefined);
  const known = [
    { id: "up-1", folder: "/srv/data/uploads/up-1/files" },
    { id: "up-2", folder: "/srv/data/uploads/up-2/files" },
  ];
  expect(textOf({ id: "job-1", kind: "train", spec: spec as never }, root, known)).toBe(
    "# From job-1.\nkind: train\nname: mine\nmodel:\n  path: upload:up-1\n" +
      "data:\n  files:\n    - upload:up-2/a.txt\n    - /elsewhere.txt\ntraining:\n  steps: 7\n",
  );
});

test("of a picked folder pickles are left out where safetensors are, and its own name goes", () => {
  const file = new File([], "x");
  const found = ["m/config.json", "m/model.safetensors", "m/training_args.bin", "m/.git/HEAD"].map((path) => ({ path, file }));
  const { files, leftOut } = usable(found, "model");
  expect(files.map(({ path }) => path)).toEqual(["config.json", "model.safetensors"]);
  expect(leftOut).toEqual(["m/training_args.bin"]);
  expect(usable([{ path: "a.txt", file }], "data").files.map(({ path }) => path)).toEqual(["a.txt"]);
});

test("labels and help have their Chinese, and none is left over", () => {
  const said = new Set(
    Object.values(roots)
      .flatMap((root) => root.fields.flatMap(leaves))
      .flatMap((field) => [field.label, field.help])
      .filter((text) => text !== ""),
  );
  const known = new Set(Object.keys(chinese));
  expect({ missing: [...said].filter((text) => !known.has(text)), leftOver: [...known].filter((text) => !said.has(text)) }).toEqual({
    missing: [],
    leftOver: [],
  });
});
