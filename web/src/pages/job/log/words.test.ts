import { expect, test } from "vitest";

import { eventOf } from "../../../api/events/fixture";
import { wordsOf } from "../../../i18n/fixture";
import { groupOf, toneOf, wordsFor } from "./words";

const english = await wordsOf("en");
const chinese = await wordsOf("zh");

test("a sample shows the prompt and what follows", () => {
  expect(wordsFor(eventOf("sampled", { step: 20, prompt: "The License", text: " and the" }), english)).toBe(
    "Sample at step 20: “The License” continues “ and the”.",
  );
});

test("a validation lists its metrics, and a reached target its costs", () => {
  expect(wordsFor(eventOf("validated", { split: "test", step: 9, loss: 0.25, accuracy: 0.9375, f1: 0.9, auroc: null }), english)).toBe(
    "Final test at step 9: loss 0.2500, accuracy 93.8%, F1 0.900.",
  );
  const reached = { step: 20, metric: "rmse", value: 54.321, seconds: 65, sent_bytes: 2048 };
  expect(wordsFor(eventOf("target-reached", reached), english)).toBe("Target reached at step 20: RMSE 54.3, after 1 min 5 s and 2.0 KiB sent.");
});

test("a link says whether it started, and why not", () => {
  const event = eventOf("link", { link: "serve", state: "failed", reason: "a deployment named poet is up already" });
  expect(wordsFor(event, english)).toBe("then.serve failed: a deployment named poet is up already.");
  expect(toneOf(event)).toBe("error");
  expect(groupOf(eventOf("link", { link: "serve", state: "started", reason: "dep-a was started" }))).toBe("results");
});

test("a sweep says what it did with its trials", () => {
  const event = { number: 2, job: "job-b", what: "stopped", settings: {}, reason: "accuracy 0.5 at step 10 is number 2 of 2 trials so far" };
  expect(wordsFor(eventOf("trial", event), english)).toBe("Trial 2 (job-b) was stopped: accuracy 0.5 at step 10 is number 2 of 2 trials so far.");
  expect(wordsFor(eventOf("trial", { ...event, what: "started", reason: null }), english)).toBe("Trial 2 (job-b) was started.");
  expect(wordsFor(eventOf("trials", { done: 3, total: 8 }), english)).toBe("3 of 8 trials are over.");
  expect(groupOf(eventOf("trials", { done: 3, total: 8 }))).toBe("progress");
});

test("a reason that begins with the state or outcome is not doubled", () => {
  const state = (state: string, reason: string) => wordsFor(eventOf("state", { state, reason }), english);
  expect(state("running", "running on 2 machines in 1 stage")).toBe("Running on 2 machines in 1 stage.");
  expect(state("cancelled", "cancelled on request")).toBe("Cancelled on request.");
  expect(state("running", "the plan is ready")).toBe("Running: the plan is ready.");
  expect(wordsFor(eventOf("ended", { outcome: "cancelled", reason: "cancelled on request" }), english)).toBe("The attempt ended: cancelled on request.");
});

test("an epoch says who came and went, and what it cost", () => {
  const reformed = (recomputed: number) => wordsFor(eventOf("reformed", { sentence: "ada was lost", seconds: 0.8, recomputed }), english);
  expect(reformed(0)).toBe("ada was lost; no step for 800.0 ms.");
  expect(reformed(1)).toBe("ada was lost; no step for 800.0 ms, 1 microbatch computed again.");
  expect(reformed(3)).toBe("ada was lost; no step for 800.0 ms, 3 microbatches computed again.");
});

const stage = (...names: string[]) => ({ start: 0, stop: 4, parameters: 1, members: names.map((name) => ({ contributor_id: name, name, microbatches: [0] })) });

test("a plan names its machines, also those of all branches", () => {
  const planned = (plan: object) => wordsFor(eventOf("planned", { plan: { num_layers: 4, stages: [stage("ash"), stage("birch")], ...plan } }), english);
  // Plans of older releases have no branches.
  expect(planned({})).toBe("Planned 4 layers in 2 stages on ash and birch.");
  expect(planned({ branches: [] })).toBe("Planned 4 layers in 2 stages on ash and birch.");
  const branches = [
    { number: 0, stages: [stage("ash"), stage("birch")] },
    { number: 1, stages: [stage("cedar")] },
    { number: 2, stages: [stage("ash"), stage("birch")] },
    { number: 3, stages: [stage("cedar")] },
    { number: 4, stages: [stage("cedar")] },
  ];
  expect(planned({ branches })).toBe("Planned 4 layers: branches 0, 2 on ash and birch; branches 1, 3–4 on cedar.");
});

test("a round says what was exchanged, and which branches were missing", () => {
  const branches = [
    { number: 0, loss: 2, sent_bytes: 1024 },
    { number: 1, loss: 3, sent_bytes: 512 },
  ];
  const event = eventOf("round", { round: 3, step: 90, branches, missing: [2], update_bytes: 2048, weight_bytes: 65_536 });
  expect(wordsFor(event, english)).toBe(
    "Round 3 merged 2 branches after step 90, loss 2.5000: each sent 1.0 KiB and received 2.0 KiB, of 64.0 KiB of weights. Without branch 2.",
  );
  expect(groupOf(event)).toBe("progress");
});

test("metrics of tasks have the names of the tasks", () => {
  const tasks = { "digit.loss": 0.5, "digit.accuracy": 0.9375, "ink.r2": 0.25 };
  expect(wordsFor(eventOf("validated", { split: "test", step: 9, loss: 0.25, tasks }), english)).toBe(
    "Final test at step 9: loss 0.2500, digit loss 0.5000, digit accuracy 93.8%, ink R² 0.250.",
  );
  const target = { step: 3, metric: "digit.accuracy", value: 0.5, seconds: 1, sent_bytes: 0 };
  expect(wordsFor(eventOf("target-reached", target), english)).toContain("digit accuracy 50.0%");
});

test("events have Chinese words", () => {
  expect(wordsFor(eventOf("trials", { done: 3, total: 8 }), chinese)).toBe("8 次试验中 3 次已结束。");
  expect(wordsFor(eventOf("labelled", { tags: [], group: null }), chinese)).toBe("标签：无；分组：无；备注：无。");
  const validated = eventOf("validated", { split: "test", step: 9, loss: 0.25, accuracy: 0.9375 });
  expect(wordsFor(validated, chinese)).toBe("第 9 步的最终测试：损失 0.2500，准确率 93.8%。");
});

test("notes are sentences, and begin with names as they are", () => {
  const note = (message: string) => wordsFor(eventOf("note", { message }), english);
  expect(note("the pinned plan no longer holds: the job continues without elm")).toBe(
    "The pinned plan no longer holds: the job continues without elm.",
  );
  expect(note("elm ran out of memory at step 4: it is given less")).toBe("elm ran out of memory at step 4: it is given less.");
});
