/** The state that all inputs of the form share, and their common layout. */
import type { TextInputProps } from "@mantine/core";
import { createContext, useContext } from "react";

import type { Draft } from "../draft";
import type { Field } from "../schema/schema";

/** The help text is below the input, so that inputs side by side are aligned. */
export const BELOW = { inputWrapperOrder: ["label", "input", "error", "description"] } satisfies Partial<TextInputProps>;

export interface Form {
  draft: Draft;
  /** Problems by field; the parts of a field's name are separated by dots. */
  problems: ReadonlyMap<string, readonly string[]>;
  onText: (text: string) => void;
  /** Report a started (1) or finished (-1) upload; the job cannot be submitted before all are finished. */
  onSending: (change: 1 | -1) => void;
}

export const FormContext = createContext<Form | null>(null);

export function useForm(): Form {
  const form = useContext(FormContext);
  if (form === null) throw new Error("there is no form around this input");
  return form;
}

export interface Handle {
  value: unknown;
  /** Set the value; undefined removes the field, so that its default applies. */
  set: (value: unknown) => void;
  error: string | undefined;
}

/** The value of a field, a setter, and its problems. */
export function useField(field: Field): Handle {
  const { draft, problems, onText } = useForm();
  return {
    value: draft.get(field.path),
    set: (value) => onText(value === undefined ? draft.without(field.path) : draft.with(field.path, value)),
    error: problems.get(field.path.join("."))?.join("; "),
  };
}

/** Problems of a field and of all fields inside it. */
export function problemsWithin(problems: Form["problems"], fields: readonly Field[]): number {
  let found = 0;
  for (const [place, some] of problems) {
    if (fields.some((field) => belongs(place, field))) found += some.length;
  }
  return found;
}

function belongs(place: string, field: Field): boolean {
  const own = field.path.join(".");
  return place === own || field.fields.some((inner) => inner.path.length > field.path.length && belongs(place, inner));
}
