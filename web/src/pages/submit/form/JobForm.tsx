/** The form of a job, made from its schema: essential fields first, the others folded. */
import { Input, Stack, Text } from "@mantine/core";
import { useEffect, useMemo, useRef } from "react";
import { useTranslation } from "react-i18next";

import { Section } from "../../../components/frame/Page";
import { sentence } from "../../../components/Feedback";
import { FieldGrid, FieldInput, Fields } from "./FieldInput";
import classes from "./Form.module.css";
import { FormContext, problemsWithin, useForm, type Form } from "./form";
import { layOut, type Part } from "../schema/layout";
import { short } from "../draft";
import type { Field } from "../schema/schema";

interface Props extends Form {
  root: Field;
  kind: string;
}

export function JobForm({ root, kind, ...form }: Props) {
  const { t } = useTranslation();
  const parts = useMemo(() => layOut(root, kind), [root, kind]);
  return (
    <FormContext value={form}>
      {parts.map((part, index) => (
        <Section key={part.title} title={t(part.title)}>
          {index === 0 && <Whole />}
          {part.fields.length > 0 && <Body part={part} root={root} />}
          {part.folds.length > 0 && (
            <div>
              {part.folds.map((fold) => (
                <Fold key={fold.title} fold={fold} />
              ))}
            </div>
          )}
        </Section>
      ))}
    </FormContext>
  );
}

/** Problems of the job as a whole, or of fields that have no input. */
function Whole() {
  const { problems } = useForm();
  return (
    <>
      {problems.get("")?.map((problem) => (
        <Input.Error key={problem} role="alert">
          {sentence(problem)}
        </Input.Error>
      ))}
    </>
  );
}

/** The fields of a part; alternatives at any depth of the schema become a choice. */
function Body({ part, root }: { part: Part; root: Field }) {
  const parents = new Map<string, Field>();
  const plain: Field[] = [];
  for (const field of part.fields) {
    const parent = parentOf(root, field);
    if (parent.exactlyOne.includes(field.path.at(-1)!)) parents.set(parent.path.join("."), parent);
    else plain.push(field);
  }
  const [lines, objects] = [plain.filter((field) => field.kind !== "object"), plain.filter((field) => field.kind === "object")];
  return (
    <Stack gap="md">
      {lines.length > 0 && <FieldGrid fields={lines} />}
      {[...parents.values()].map((parent) => (
        <Fields
          key={parent.path.join(".")}
          of={{ ...parent, fields: parent.fields.filter((field) => parent.exactlyOne.includes(field.path.at(-1)!)) }}
        />
      ))}
      {objects.map((field) => (
        <FieldInput key={field.path.join(".")} field={field} />
      ))}
    </Stack>
  );
}

function parentOf(root: Field, field: Field): Field {
  let parent = root;
  for (const key of field.path.slice(0, -1)) {
    parent = parent.fields.find((one) => one.path.at(-1) === key) ?? parent;
  }
  return parent;
}

function Fold({ fold }: { fold: Part }) {
  const { t } = useTranslation();
  const { draft, problems } = useForm();
  const wrong = problemsWithin(problems, fold.fields);
  const given = fold.fields.flatMap((field) => leaves(field)).filter((field) => draft.get(field.path) !== undefined);
  const details = useRef<HTMLDetailsElement>(null);
  // A problem inside opens the fold. The fold is never closed automatically, because the user may be typing in it.
  useEffect(() => {
    if (wrong > 0 && details.current !== null) details.current.open = true;
  }, [wrong > 0]);
  return (
    <details ref={details} className={classes.fold}>
      <summary>
        {t(fold.title)}
        {wrong > 0 ? (
          <Text component="span" size="xs" className={classes.wrong!}>
            {t("{{count}} problems", { count: wrong })}
          </Text>
        ) : (
          given.length > 0 && (
            <Text component="span" size="xs" truncate className={classes.changed!}>
              {given.map((field) => `${field.path.at(-1)} ${short(draft.get(field.path))}`).join(", ")}
            </Text>
          )
        )}
      </summary>
      <Stack gap="md" pb="md">
        {fold.fields.filter((field) => field.kind !== "object").length > 0 && (
          <FieldGrid fields={fold.fields.filter((field) => field.kind !== "object")} />
        )}
        {fold.fields
          .filter((field) => field.kind === "object")
          .map((field) => (
            <FieldInput key={field.path.join(".")} field={field} />
          ))}
      </Stack>
    </details>
  );
}

function leaves(field: Field): Field[] {
  return field.kind === "object" && !field.isNullable ? field.fields.flatMap(leaves) : [field];
}
