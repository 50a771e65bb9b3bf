/** Programs that call a deployment, to be copied; they run unchanged once the key is filled in. */
export type Language = "python" | "curl";
/** The route of the OpenAI API that a model answers. */
export type Route = "chat/completions" | "completions" | "embeddings";

/** The route that suits a model; chat for an unknown model. */
export function routeOf(model: { kind: "generate" | "embed"; has_chat_template: boolean } | undefined): Route {
  if (model?.kind === "embed") return "embeddings";
  return model?.has_chat_template === false ? "completions" : "chat/completions";
}

/** The body of an example request. */
function example(name: string, route: Route): Record<string, unknown> {
  return {
    embeddings: { model: name, input: ["a text", "another one"] },
    completions: { model: name, prompt: "The sea is", max_tokens: 64 },
    "chat/completions": { model: name, messages: [{ role: "user", content: "Sing of the sea." }] },
  }[route];
}

/** Fields that the client of OpenAI takes as arguments; others are sent in `extra_body`. */
const ARGUMENTS = ["model", "messages", "prompt", "input", "temperature", "top_p", "max_tokens", "seed", "stop"];

/** A program that sends a request and prints the answer; by default an example that suits the route. */
export function snippet(language: Language, name: string, origin: string, route: Route, request = example(name, route)): string {
  const body = route === "embeddings" ? request : { ...request, stream: true };
  return language === "python" ? python(body, origin, route) : curl(body, origin, route);
}

function python(body: Record<string, unknown>, origin: string, route: Route): string {
  const own = Object.entries(body).filter(([field]) => field !== "stream" && ARGUMENTS.includes(field));
  const others = Object.entries(body).filter(([field]) => field !== "stream" && !ARGUMENTS.includes(field));
  const lines = own.map(([field, value]) => `    ${field}=${literal(value)},`);
  if (route !== "embeddings") lines.push("    stream=True,");
  if (others.length > 0) lines.push(`    extra_body=${literal(Object.fromEntries(others))},`);
  const call = { embeddings: "embeddings", completions: "completions", "chat/completions": "chat.completions" }[route];
  const start = `from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key="YOUR_API_KEY")
answer = client.${call}.create(
${lines.join("\n")}
)
`;
  if (route === "embeddings") return `${start}vectors = [one.embedding for one in answer.data]`;
  const text = route === "completions" ? "choice.text" : 'choice.delta.content or ""';
  return `${start}for chunk in answer:
    for choice in chunk.choices:
        print(${text}, end="", flush=True)`;
}

/** A value as Python. The strings of JSON are valid strings of Python, except halves of surrogate pairs. */
function literal(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object" && value !== null) {
    return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${literal(one)}`).join(", ")}}`;
  }
  if (typeof value === "boolean") return value ? "True" : "False";
  return value === null || value === undefined ? "None" : JSON.stringify(value);
}

function curl(body: Record<string, unknown>, origin: string, route: Route): string {
  // Inside single quotes a shell changes nothing, and only a single quote ends them.
  const text = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl -N ${origin}/v1/${route} \\
  -H "Authorization: Bearer YOUR_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '${text}'`;
}
