import { expect, test } from "vitest";

import { isJobId, matching } from "./find";

const entries = ["Submit a job", "Jobs", "my-job", "Enjobber"].map((label) => ({ label }));

test("beginnings come before beginnings of words, and these before parts of words", () => {
  expect(matching(entries, "job").map(({ label }) => label)).toEqual(["Jobs", "Submit a job", "my-job", "Enjobber"]);
});

test("every word must be found, in the label or in the further words", () => {
  expect(matching([{ label: "提交", also: "Submit a job" }], "提交 SUB")).toHaveLength(1);
  expect(matching(entries, "submit jobs")).toEqual([]);
  expect(matching(entries, " ")).toHaveLength(4);
});

test("a job's id is recognized", () => {
  expect(["job-abcd2345", "job-abcd", "job-abcd1890", "x job-abcd2345"].map(isJobId)).toEqual([true, false, false, false]);
});
