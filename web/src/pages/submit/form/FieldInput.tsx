/** The input of one field of the form, by the field's kind. */
import { Checkbox, Input, NativeSelect, SegmentedControl, Stack, Textarea, TextInput } from "@mantine/core";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import { sentence } from "../../../components/Feedback";
import { Draft, readShort, short, written } from "../draft";
import classes from "./Form.module.css";
import { BELOW, useField, useForm } from "./form";
import { useWords } from "../schema/fieldWords";
import { ModelConfig } from "./ModelConfig";
import { configOf } from "./modelSizes";
import { PathInput } from "./PathInput";
import { RowsInput } from "./RowsInput";
import type { Field } from "../schema/schema";

export function FieldInput({ field }: { field: Field }) {
  switch (field.kind) {
    case "boolean":
      return <Switched field={field} />;
    case "choice":
      return <Choice field={field} />;
    case "path":
    case "paths":
      return <PathInput field={field} />;
    case "object":
      if (field.tag !== "") return <Tagged field={field} />;
      return field.isNullable ? <Optional field={field} /> : <Fields of={field} />;
    case "rows":
      return <RowsInput field={field} />;
    case "text":
    case "number":
      return <Line field={field} />;
    case "strings":
      return <Lines field={field} />;
    case "yaml":
      return field.path.at(-1) === "config" ? (
        <ModelConfig field={field}>
          <Lines field={field} />
        </ModelConfig>
      ) : (
        <Lines field={field} />
      );
  }
}

/** The fields of an object. If exactly one of several must be given, the user chooses one. */
export function Fields({ of }: { of: Field }) {
  const { draft } = useForm();
  const isAlternative = (field: Field) => of.exactlyOne.includes(field.path.at(-1)!);
  const alternatives = of.fields.filter(isAlternative);
  // Only a model on the Hub has a revision. An invalid one stays visible, so that the user can remove it.
  const isHidden = (field: Field) =>
    field.path.at(-1) === "revision" && [["hub"], ["revision"]].every((key) => draft.get([...of.path, ...key]) === undefined);
  const others = of.fields.filter((field) => !isAlternative(field) && !isHidden(field));
  return (
    <>
      {alternatives.length > 0 && <Alternatives of={of} fields={alternatives} />}
      {others.length > 0 && <FieldGrid fields={others} />}
    </>
  );
}

/**
 * A choice among alternatives, followed by the fields of the chosen alternative. The first alternative is the default.
 */
function Tagged({ field }: { field: Field }) {
  const { draft } = useForm();
  const { set, error } = useField(field);
  const { label, help } = useWords();
  const tag = field.fields.find((one) => one.path.at(-1) === field.tag)!;
  const chosen = String(draft.get(tag.path) ?? tag.choices[0]);
  const fields = field.fields.filter((one) => one !== tag && one.only?.includes(chosen));
  const wrong = useField(tag).error ?? error;
  return (
    <Stack gap="sm">
      <NativeSelect
        {...BELOW}
        label={label(field)}
        description={help(field)}
        error={wrong && sentence(wrong)}
        value={chosen}
        onChange={(event) => set(event.currentTarget.value === tag.choices[0] ? undefined : { [field.tag]: event.currentTarget.value })}
        // The current value stays visible, even if it is invalid.
        data={tag.choices.includes(chosen) ? tag.choices : [chosen, ...tag.choices]}
      />
      {fields.length > 0 && (
        <div className={classes.inner}>
          <FieldGrid fields={fields} />
        </div>
      )}
    </Stack>
  );
}

/** Short inputs, side by side if there is room. */
export function FieldGrid({ fields }: { fields: readonly Field[] }) {
  return (
    <div className={classes.grid}>
      {fields.map((field) => (
        <div key={field.path.join(".")} className={isWide(field) ? classes.wide : undefined}>
          <FieldInput field={field} />
        </div>
      ))}
    </div>
  );
}

function isWide(field: Field): boolean {
  return ["object", "rows", "path", "paths", "yaml", "strings"].includes(field.kind);
}

/** Initial value of an alternative. */
function beginning(field: Field): unknown {
  switch (field.kind) {
    case "choice":
      return field.choices[0];
    case "rows":
      return [{ type: "linear", options: { in_features: 64, out_features: 10 } }];
    case "paths":
      return [];
    case "object":
      return {};
    case "yaml":
      return configOf("tiny");
    default:
      return "";
  }
}

function Alternatives({ of, fields }: { of: Field; fields: readonly Field[] }) {
  const { draft, onText, problems } = useForm();
  const { label, help } = useWords();
  const { t } = useTranslation();
  const chosen = fields.find((field) => (draft.get(field.path) ?? null) !== null) ?? fields[0]!;
  const choose = (name: string) => {
    const next = fields.find((field) => field.path.at(-1) === name);
    if (next === undefined || next === chosen) return;
    // The order matters: this way their common parent keeps its place in the text.
    const both = new Draft(draft.with(next.path, beginning(next)));
    onText(both.get(chosen.path) === undefined ? both.text : both.without(chosen.path));
  };
  // The server names the object in errors about the choice itself.
  const error = problems.get(of.path.join("."))?.map(sentence).join(" ");
  return (
    <Stack gap="xs">
      <div>
        <SegmentedControl
          aria-label={of.path.length === 0 ? t("Answered by") : label(of)}
          className={classes.alternatives!}
          value={chosen.path.at(-1)!}
          onChange={choose}
          data={fields.map((field) => ({ value: field.path.at(-1)!, label: label(field) }))}
        />
        <Input.Description mt={4}>{of.path.length === 0 ? "" : help(of)}</Input.Description>
        {error !== undefined && <Input.Error mt={4}>{error}</Input.Error>}
      </div>
      {chosen.kind === "object" ? <Fields of={chosen} /> : <FieldInput field={chosen} />}
    </Stack>
  );
}

/** Text or a number; an empty input means the default, which is its placeholder. */
function Line({ field }: { field: Field }) {
  const { value, set, error } = useField(field);
  const { label, help } = useWords();
  // While the user is typing, "0." is not a complete number yet.
  const [own, setOwn] = useState<string | null>(null);
  const isNumber = field.kind === "number";
  const change = (text: string) => {
    setOwn(text);
    if (text.trim() === "") return set(undefined);
    const number = Number(text);
    set(isNumber && Number.isFinite(number) ? number : text);
  };
  return (
    <TextInput
      {...BELOW}
      label={label(field)}
      description={help(field)}
      error={error && sentence(error)}
      withAsterisk={field.isRequired}
      placeholder={short(field.fallback)}
      inputMode={isNumber ? "decimal" : "text"}
      value={own ?? asText(value)}
      onChange={(event) => change(event.currentTarget.value)}
      onBlur={() => setOwn(null)}
      spellCheck={false}
      autoComplete="off"
    />
  );
}

function asText(value: unknown): string {
  if (value === undefined || value === null) return "";
  return typeof value === "object" ? short(value) : String(value);
}

/** Texts, one on each line, or YAML. */
function Lines({ field }: { field: Field }) {
  const { value, set, error } = useField(field);
  const { label, help } = useWords();
  const [own, setOwn] = useState<string | null>(null);
  const isYaml = field.kind === "yaml";
  const isConfig = isYaml && field.fallback === null && typeof value === "object" && value !== null && !Array.isArray(value);
  const change = (text: string) => {
    setOwn(text);
    if (text.trim() === "") return set(field.isRequired && !isYaml ? [] : undefined);
    set(isYaml ? readShort(text) : text.split("\n").filter((line) => line !== ""));
  };
  const shown = isYaml ? (isConfig ? written(value).trimEnd() : short(value)) : Array.isArray(value) ? value.join("\n") : asText(value);
  const common = {
    ...BELOW,
    label: label(field),
    description: help(field),
    error: error && sentence(error),
    withAsterisk: field.isRequired,
    value: own ?? shown,
    onBlur: () => setOwn(null),
    spellCheck: false,
  };
  const isOneLine = isYaml && !isConfig && !shown.includes("\n");
  if (isOneLine) {
    return <TextInput {...common} placeholder={short(field.fallback)} onChange={(event) => change(event.currentTarget.value)} autoComplete="off" />;
  }
  return (
    <Textarea
      {...common}
      rows={Math.min(12, Math.max(2, (own ?? shown).split("\n").length))}
      onChange={(event) => change(event.currentTarget.value)}
      classNames={{ input: isYaml ? classes.code! : "" }}
    />
  );
}

function Choice({ field }: { field: Field }) {
  const { value, set, error } = useField(field);
  const { label, help } = useWords();
  const { t } = useTranslation();
  const hasDefault = !field.isRequired;
  const fallback = field.fallback == null ? t("default") : t("default: {{value}}", { value: String(field.fallback) });
  return (
    <NativeSelect
      {...BELOW}
      label={label(field)}
      description={help(field)}
      error={error && sentence(error)}
      withAsterisk={field.isRequired}
      value={asText(value)}
      onChange={(event) => set(event.currentTarget.value === "" ? undefined : event.currentTarget.value)}
      data={[
        ...(hasDefault ? [{ value: "", label: fallback }] : []),
        // The current value stays visible, even if it is invalid.
        ...(asText(value) !== "" && !field.choices.includes(asText(value)) ? [asText(value)] : []),
        ...field.choices,
      ]}
    />
  );
}

/** 24 pixels: the minimum size of a target that is close to others (WCAG 2.2, 2.5.8). */
const largeBox = () => ({ root: { "--checkbox-size": "1.5rem" } });

function Switched({ field }: { field: Field }) {
  const { value, set, error } = useField(field);
  const { label, help } = useWords();
  const isOn = value ?? field.fallback;
  return (
    <Checkbox
      className={classes.check!}
      vars={largeBox}
      label={label(field)}
      description={help(field)}
      error={error && sentence(error)}
      checked={isOn === true}
      onChange={(event) => set(event.currentTarget.checked === field.fallback ? undefined : event.currentTarget.checked)}
    />
  );
}

/** An object that is off by default. */
function Optional({ field }: { field: Field }) {
  const { value, set, error } = useField(field);
  const { label, help } = useWords();
  const isOn = value !== undefined && value !== null;
  return (
    <Stack gap="sm">
      <Checkbox
        vars={largeBox}
        label={label(field)}
        description={help(field)}
        error={error && sentence(error)}
        checked={isOn}
        onChange={(event) => set(event.currentTarget.checked ? {} : undefined)}
      />
      {isOn && (
        <div className={classes.inner}>
          <Fields of={field} />
        </div>
      )}
    </Stack>
  );
}
