/** Configurations of small Llama models, so that users need not write one by hand. */

export const SIZES = ["tiny", "small", "medium"] as const;
export type Size = (typeof SIZES)[number];

/** The fields of a configuration that determine the size. */
type Shape = Record<(typeof KEYS)[number], number>;
const KEYS = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"] as const;

const shape = (...values: number[]) => Object.fromEntries(KEYS.map((key, place) => [key, values[place]!])) as Shape;

const SHAPES: Record<Size, Shape> = {
  tiny: shape(192, 512, 6, 6, 2),
  small: shape(512, 1376, 8, 8, 4),
  medium: shape(768, 2048, 12, 12, 4),
};

/** Used if a configuration does not set the value. */
const REST = { model_type: "llama", vocab_size: 2048, max_position_embeddings: 256 };

type Config = Readonly<Record<string, unknown>>;

/** Return a configuration of this size, with the vocabulary and the length of the previous configuration. */
export function configOf(size: Size, before: Config = {}): Config {
  const { vocab_size = REST.vocab_size, max_position_embeddings = REST.max_position_embeddings } = before;
  return { model_type: REST.model_type, vocab_size, ...SHAPES[size], max_position_embeddings, tie_word_embeddings: true };
}

/** The size of a configuration; null for one that was written by hand. */
export function sizeOf(config: Config): Size | null {
  if (config.model_type !== "llama") return null;
  return SIZES.find((size) => KEYS.every((key) => config[key] === SHAPES[size][key])) ?? null;
}

/** Number of parameters of a Llama model, with the output's weights tied to the embedding's. */
export function parametersOf(size: Size, vocabulary = REST.vocab_size): number {
  const one = SHAPES[size];
  const [hidden, keys] = [one.hidden_size, (one.hidden_size / one.num_attention_heads) * one.num_key_value_heads];
  const layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * one.intermediate_size + 2 * hidden;
  return vocabulary * hidden + one.num_hidden_layers * layer + hidden;
}
