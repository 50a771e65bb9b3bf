/** A refusal by the server as an error: an RFC 9457 problem document. */
import i18next from "i18next";

export interface FieldProblem {
  /** Path with dots, e.g. `training.optimizer.name`; empty if the problem concerns the whole document. */
  field: string;
  problem: string;
}

interface ProblemDocument {
  type?: string;
  title?: string;
  status?: number;
  detail?: string;
  hint?: string;
  details?: { fields?: unknown } & Record<string, unknown>;
  /** Error code for programs; only routes under `/v1` have one. */
  code?: string;
}

/** The error format of routes under `/v1`, which clients of the OpenAI API expect. */
export interface OpenAiError {
  message: string;
  code?: string | null;
}

export class ApiProblem extends Error {
  readonly status: number;
  /** One suggested action. */
  readonly hint: string | undefined;
  readonly code: string | undefined;
  readonly fields: readonly FieldProblem[];

  constructor(status: number, document: ProblemDocument) {
    super(document.detail ?? document.title ?? `the server answered ${status}`);
    this.name = "ApiProblem";
    this.status = status;
    this.hint = document.hint;
    this.code = document.code;
    this.fields = fieldProblems(document.details?.fields);
  }

  /** Whether a retry may help: the server is starting, restarting or unreachable. */
  get mayPass(): boolean {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** The fields of an error's details; empty if it concerns no field. */
export function fieldProblems(value: unknown): FieldProblem[] {
  if (!Array.isArray(value)) return [];
  return value.filter(
    (item): item is FieldProblem => typeof item?.field === "string" && typeof item?.problem === "string",
  );
}

/** Read the problem document of an error response. */
export async function problemOf(response: Response): Promise<ApiProblem> {
  const isJson = /\bjson\b/.test(response.headers.get("content-type") ?? "");
  const document = isJson ? ((await response.json().catch(() => ({}))) as ProblemDocument & { error?: OpenAiError }) : {};
  return document.error === undefined ? new ApiProblem(response.status, document) : ofOpenAi(response.status, document.error);
}

/** Convert an error of `/v1`: its message ends with the hint, after the last semicolon. */
export function ofOpenAi(status: number, { message, code }: OpenAiError): ApiProblem {
  const end = message.lastIndexOf("; ");
  const [detail, hint] = end < 0 ? [message, undefined] : [message.slice(0, end), message.slice(end + 2)];
  return new ApiProblem(status, { detail, ...(hint !== undefined && { hint }), ...(code != null && { code }) });
}

export function unreachable(): ApiProblem {
  return new ApiProblem(0, {
    detail: i18next.t("the server does not answer"),
    hint: i18next.t("check that share-compute up is still running; this page continues by itself when it is back"),
  });
}

/** The code of a page cannot be loaded. */
export function pageNotLoaded(): ApiProblem {
  return new ApiProblem(0, {
    detail: i18next.t("this page cannot be loaded from the server"),
    hint: i18next.t("check that share-compute up is still running, and that this device reaches its machine"),
  });
}
