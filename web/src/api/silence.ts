/** Notices a connection that nobody closed and that brings nothing any more. */

/** The server gives a sign of life every 10 s; after so long a silence nobody is there. */
const SILENCE_MS = 30_000;

/** The text of a body; `onSilence` is called when nothing came for too long, until `stop` is. */
export function untilSilent(body: ReadableStream<Uint8Array>, onSilence: () => void): { text: ReadableStream<string>; stop: () => void } {
  let timer = setTimeout(onSilence, SILENCE_MS);
  const listening = new TransformStream<Uint8Array, Uint8Array>({
    transform: (bytes, controller) => {
      clearTimeout(timer);
      timer = setTimeout(onSilence, SILENCE_MS);
      controller.enqueue(bytes);
    },
  });
  const decoder = new TextDecoderStream() as TransformStream<Uint8Array, string>;
  return { text: body.pipeThrough(listening).pipeThrough(decoder), stop: () => clearTimeout(timer) };
}
