/** What the server answers when it refuses: an RFC 9457 problem document, as an error. */

export interface FieldProblem {
  /** Path with dots, e.g. `training.optimizer.name`; empty when it concerns the whole. */
  field: string;
  problem: string;
}

interface ProblemDocument {
  type?: string;
  title?: string;
  status?: number;
  detail?: string;
  mend?: string;
  details?: { fields?: unknown } & Record<string, unknown>;
}

export class ApiProblem extends Error {
  readonly status: number;
  /** One suggested action. */
  readonly mend: string | undefined;
  readonly fields: readonly FieldProblem[];

  constructor(status: number, document: ProblemDocument) {
    super(document.detail ?? document.title ?? `the server answered ${status}`);
    this.name = "ApiProblem";
    this.status = status;
    this.mend = document.mend;
    this.fields = fieldProblems(document.details?.fields);
  }

  /** Whether asking again may help: the server is starting, restarting or unreachable. */
  get mayPass(): boolean {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

function fieldProblems(value: unknown): FieldProblem[] {
  if (!Array.isArray(value)) return [];
  return value.filter(
    (item): item is FieldProblem => typeof item?.field === "string" && typeof item?.problem === "string",
  );
}

/** Read the problem of a refused answer. */
export async function problemOf(response: Response): Promise<ApiProblem> {
  const isJson = /\bjson\b/.test(response.headers.get("content-type") ?? "");
  const document = isJson ? ((await response.json().catch(() => ({}))) as ProblemDocument) : {};
  return new ApiProblem(response.status, document);
}

export function unreachable(): ApiProblem {
  return new ApiProblem(0, {
    detail: "the server does not answer",
    mend: "check that share-compute up is still running; this page goes on by itself when it is back",
  });
}
