import { afterEach, beforeEach, expect, test, vi } from "vitest";

import { withReadTimeout } from "./readTimeout";

beforeEach(() => {
  vi.useFakeTimers();
});
afterEach(() => {
  vi.useRealTimers();
});

/** A body, and a function that sends text through it. */
function body(): { stream: ReadableStream<Uint8Array>; send: (text: string) => void } {
  let writer: ReadableStreamDefaultController<Uint8Array>;
  const stream = new ReadableStream<Uint8Array>({
    start: (controller) => {
      writer = controller;
    },
  });
  return { stream, send: (text) => writer.enqueue(new TextEncoder().encode(text)) };
}

test("a connection that brings nothing for 30 s is noticed, and signs of life put that off", async () => {
  const { stream, send } = body();
  const onTimeout = vi.fn();
  const reader = withReadTimeout(stream, onTimeout).text.getReader();
  await vi.advanceTimersByTimeAsync(29_000);
  send(": still here\n");
  expect((await reader.read()).value).toBe(": still here\n");
  await vi.advanceTimersByTimeAsync(29_000);
  expect(onTimeout).not.toHaveBeenCalled();
  await vi.advanceTimersByTimeAsync(1_001);
  expect(onTimeout).toHaveBeenCalledOnce();
});

test("who stops listening is not called", async () => {
  const onTimeout = vi.fn();
  withReadTimeout(body().stream, onTimeout).stop();
  await vi.advanceTimersByTimeAsync(60_000);
  expect(onTimeout).not.toHaveBeenCalled();
});
