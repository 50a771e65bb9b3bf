/** A list of objects (the layers of a model, or its tasks), one row for each, in order. */
import { Button, Group, Input, NativeSelect, Text, Textarea, TextInput } from "@mantine/core";
import { useState, type ChangeEvent } from "react";
import { useTranslation } from "react-i18next";

import { sentence } from "../../../components/Feedback";
import { readShort, short } from "../draft";
import { useWords } from "../schema/fieldWords";
import classes from "./Form.module.css";
import { useField } from "./form";
import type { Field } from "../schema/schema";

/** Number of characters above which a column gets more of the row's width. */
const LONG = 12;

type Row = Record<string, unknown>;

export function RowsInput({ field }: { field: Field }) {
  const { value, set, error } = useField(field);
  const { label, help } = useWords();
  const { t } = useTranslation();
  const rows: Row[] = Array.isArray(value) ? value.map((row) => (typeof row === "object" && row !== null ? (row as Row) : {})) : [];
  const moved = (from: number, to: number) => {
    const next = rows.filter((_, index) => index !== from);
    next.splice(to, 0, rows[from]!);
    return next;
  };
  return (
    <Input.Wrapper label={label(field)} description={help(field)} error={error && sentence(error)} labelElement="div">
      <div className={classes.table} style={{ gridTemplateColumns: columns(field.fields, rows) }}>
        {rows.length > 0 && (
          <div className={classes.headings} aria-hidden>
            {field.fields.map((one) => (
              <span key={one.path[0]}>{label(one)}</span>
            ))}
          </div>
        )}
        <ol className={classes.rows}>
          {rows.map((row, index) => (
            <li key={index} className={classes.row}>
              <Text size="sm" c="dimmed" className={classes.number!}>
                {index + 1}
              </Text>
              {field.fields.map((one) => (
                <Cell
                  key={one.path[0]}
                  field={one}
                  heading={label(one)}
                  name={t("{{field}} of row {{number}}", { field: label(one), number: index + 1 })}
                  value={row[one.path[0]!]}
                  onChange={(cell) => set(rows.map((old, at) => (at === index ? changed(old, one.path[0]!, cell) : old)))}
                />
              ))}
              <Group gap={4} wrap="nowrap">
                <RowButton onClick={() => set(moved(index, index - 1))} disabled={index === 0} aria-label={t("Move row {{number}} up", { number: index + 1 })}>
                  ↑
                </RowButton>
                <RowButton onClick={() => set(rows.filter((_, at) => at !== index))} aria-label={t("Remove row {{number}}", { number: index + 1 })}>
                  ×
                </RowButton>
              </Group>
            </li>
          ))}
        </ol>
      </div>
      <Button mt="xs" size="xs" variant="default" onClick={() => set([...rows, field.fields.some((one) => one.path[0] === "type") ? { type: "relu" } : {}])}>
        {t("Add a row")}
      </Button>
    </Input.Wrapper>
  );
}

/** Columns of the grid: the number, one for each field, the buttons. Options get more width than names. */
function columns(fields: readonly Field[], rows: readonly Row[]): string {
  const isLong = (field: Field) => rows.some((row) => short(row[field.path[0]!]).length > LONG);
  const widths = fields.map((field) => (field.kind === "choice" ? "minmax(6rem, auto)" : isLong(field) ? "minmax(6rem, 8fr)" : "minmax(3.7rem, 1fr)"));
  return ["auto", ...widths, "auto"].join(" ");
}

function changed(row: Row, key: string, cell: unknown): Row {
  const { [key]: _, ...rest } = row;
  return cell === undefined ? rest : { ...row, [key]: cell };
}

interface CellProps {
  field: Field;
  name: string;
  /** Name of the field, shown above the cell on a phone. */
  heading: string;
  value: unknown;
  onChange: (value: unknown) => void;
}

function Cell({ field, name, heading, value, onChange }: CellProps) {
  const [own, setOwn] = useState<string | null>(null);
  const current = short(value);
  const input = {
    "aria-label": name,
    classNames: { input: classes.code! },
    value: own ?? current,
    onChange: (event: ChangeEvent<HTMLInputElement | HTMLTextAreaElement>) => {
      setOwn(event.currentTarget.value);
      onChange(event.currentTarget.value.trim() === "" ? undefined : readShort(event.currentTarget.value));
    },
    onBlur: () => setOwn(null),
    spellCheck: false,
    autoComplete: "off",
  };
  return (
    <div className={classes.cell} data-long={current.length > LONG}>
      <span className={classes.heading} aria-hidden>
        {heading}
      </span>
      {field.kind === "choice" ? (
        <NativeSelect
          aria-label={name}
          value={current}
          data={[...(field.choices.includes(current) ? [] : [current]), ...field.choices]}
          onChange={(event) => onChange(event.currentTarget.value)}
        />
      ) : field.kind === "yaml" ? (
        <Textarea {...input} autosize minRows={1} />
      ) : (
        <TextInput {...input} />
      )}
    </div>
  );
}

/** A button next to a row of inputs. */
function RowButton({ children, ...rest }: { children: string; onClick: () => void; "aria-label": string; disabled?: boolean }) {
  return (
    <Group align="end">
      <Button size="compact-sm" variant="default" {...rest}>
        {children}
      </Button>
    </Group>
  );
}
