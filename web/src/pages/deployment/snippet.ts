/** Example programs that call a deployment, to be copied. Names need no quoting. */
export type Language = "python" | "curl";
/** The route of the OpenAI API that a model answers. */
export type Route = "chat/completions" | "completions" | "embeddings";

/** The route that suits a model; chat for a model that is not known yet. */
export function routeOf(model: { kind: "generate" | "embed"; has_chat_template: boolean } | undefined): Route {
  if (model?.kind === "embed") return "embeddings";
  return model?.has_chat_template === false ? "completions" : "chat/completions";
}

export function snippet(language: Language, name: string, origin: string, route: Route): string {
  return language === "python" ? python(name, origin, route) : curl(name, origin, route);
}

function python(name: string, origin: string, route: Route): string {
  const client = `from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key="YOUR_API_KEY")
`;
  if (route === "embeddings") {
    return `${client}answer = client.embeddings.create(model="${name}", input=["a text", "another one"])
vectors = [one.embedding for one in answer.data]`;
  }
  if (route === "completions") {
    return `${client}answer = client.completions.create(
    model="${name}",
    prompt="The sea is",
    max_tokens=64,
    stream=True,
)
for chunk in answer:
    print(chunk.choices[0].text, end="", flush=True)`;
  }
  return `${client}answer = client.chat.completions.create(
    model="${name}",
    messages=[{"role": "user", "content": "Sing of the sea."}],
    stream=True,
)
for chunk in answer:
    print(chunk.choices[0].delta.content or "", end="", flush=True)`;
}

function curl(name: string, origin: string, route: Route): string {
  const body = {
    embeddings: { model: name, input: ["a text"] },
    completions: { model: name, prompt: "The sea is", max_tokens: 64, stream: true },
    "chat/completions": { model: name, messages: [{ role: "user", content: "Sing of the sea." }], stream: true },
  }[route];
  return `curl -N ${origin}/v1/${route} \\
  -H "Authorization: Bearer YOUR_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '${JSON.stringify(body)}'`;
}
