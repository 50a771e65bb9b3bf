/** Detects a connection that is open but no longer delivers data. */

/** The server sends a keep-alive every 10 s. A connection without one for this time is dead. */
const READ_TIMEOUT_MS = 30_000;

/** Yields the text of a body; `onTimeout` is called if nothing arrives for too long, until `stop` is called. */
export function withReadTimeout(body: ReadableStream<Uint8Array>, onTimeout: () => void): { text: ReadableStream<string>; stop: () => void } {
  let timer = setTimeout(onTimeout, READ_TIMEOUT_MS);
  const listening = new TransformStream<Uint8Array, Uint8Array>({
    transform: (bytes, controller) => {
      clearTimeout(timer);
      timer = setTimeout(onTimeout, READ_TIMEOUT_MS);
      controller.enqueue(bytes);
    },
  });
  const decoder = new TextDecoderStream() as TransformStream<Uint8Array, string>;
  return { text: body.pipeThrough(listening).pipeThrough(decoder), stop: () => clearTimeout(timer) };
}
