import { QueryClient } from "@tanstack/react-query";
import { expect, test } from "vitest";

import { write, writeThrough } from "./write";

const KEY = ["numbers"];

test("what is out of date stays so, and is no fresher", () => {
  const client = new QueryClient();
  client.setQueryData(KEY, [1], { updatedAt: 5 });
  void client.invalidateQueries({ queryKey: KEY });
  write<number[]>(client, KEY, (old) => [...old, 2]);
  const state = client.getQueryState<number[]>(KEY)!;
  expect([state.data, state.isInvalidated, state.dataUpdatedAt]).toEqual([[1, 2], true, 5]);
});

test("what nothing changes is not touched, and what is not there is not made", () => {
  const client = new QueryClient();
  write<number[]>(client, KEY, (old) => [...old, 2]);
  expect(client.getQueryState(KEY)).toBeUndefined();
  client.setQueryData(KEY, [1]);
  const before = client.getQueryState(KEY);
  write<number[]>(client, KEY, (old) => old);
  expect(client.getQueryState(KEY)).toBe(before);
});

test("an answer on its way is changed when it comes", async () => {
  const client = new QueryClient();
  let answer: (numbers: number[]) => void = () => undefined;
  const fetched = client.fetchQuery({ queryKey: KEY, queryFn: () => new Promise<number[]>((resolve) => (answer = resolve)) });
  await Promise.resolve();
  writeThrough<number[]>(client, KEY, (old) => [...old, 2]);
  answer([1]);
  await fetched;
  await Promise.resolve();
  expect(client.getQueryData(KEY)).toEqual([1, 2]);
});
