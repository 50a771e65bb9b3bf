/** Programs that ask a deployment, to be copied. A name has no characters that would have to be quoted. */
export type Language = "python" | "curl";

export function snippet(language: Language, name: string, origin: string, isEncoder: boolean): string {
  return language === "python" ? python(name, origin, isEncoder) : curl(name, origin, isEncoder);
}

function python(name: string, origin: string, isEncoder: boolean): string {
  const client = `from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key="YOUR_API_KEY")
`;
  if (isEncoder) {
    return `${client}answer = client.embeddings.create(model="${name}", input=["a text", "another one"])
vectors = [one.embedding for one in answer.data]`;
  }
  return `${client}answer = client.chat.completions.create(
    model="${name}",
    messages=[{"role": "user", "content": "Sing of the sea."}],
    stream=True,
)
for chunk in answer:
    print(chunk.choices[0].delta.content or "", end="", flush=True)`;
}

function curl(name: string, origin: string, isEncoder: boolean): string {
  const [route, body] = isEncoder
    ? ["embeddings", { model: name, input: ["a text"] }]
    : ["chat/completions", { model: name, messages: [{ role: "user", content: "Sing of the sea." }], stream: true }];
  return `curl -N ${origin}/v1/${route} \\
  -H "Authorization: Bearer YOUR_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '${JSON.stringify(body)}'`;
}
