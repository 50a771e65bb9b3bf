/** A list of objects (the layers of a model, or its tasks), one row for each, in order. */
import { Button, Group, Input, NativeSelect, Stack, Text, TextInput } from "@mantine/core";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import { sentence } from "../../../components/Feedback";
import { readShort, short } from "../draft";
import { useWords } from "../schema/fieldWords";
import classes from "./Form.module.css";
import { useField } from "./form";
import type { Field } from "../schema/schema";

/** Letters above which a cell takes more of the row's width. */
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
      <Stack component="ol" gap="xs" mt="xs" className={classes.rows!}>
        {rows.map((row, index) => (
          <li key={index} className={classes.row}>
            <Text size="sm" c="dimmed" className={classes.number!}>
              {index + 1}
            </Text>
            {field.fields.map((one) => (
              <Cell
                key={one.path[0]}
                field={one}
                hint={label(one)}
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
      </Stack>
      <Button mt="xs" size="xs" variant="default" onClick={() => set([...rows, field.fields.some((one) => one.path[0] === "type") ? { type: "relu" } : {}])}>
        {t("Add a row")}
      </Button>
    </Input.Wrapper>
  );
}

function changed(row: Row, key: string, cell: unknown): Row {
  const { [key]: _, ...rest } = row;
  return cell === undefined ? rest : { ...row, [key]: cell };
}

interface CellProps {
  field: Field;
  name: string;
  /** Name of the field, shown while it is empty. */
  hint: string;
  value: unknown;
  onChange: (value: unknown) => void;
}

function Cell({ field, name, hint, value, onChange }: CellProps) {
  const [own, setOwn] = useState<string | null>(null);
  if (field.kind === "choice") {
    const current = short(value);
    return (
      <NativeSelect
        aria-label={name}
        value={current}
        data={[...(field.choices.includes(current) ? [] : [current]), ...field.choices]}
        onChange={(event) => onChange(event.currentTarget.value)}
      />
    );
  }
  return (
    <TextInput
      aria-label={name}
      className={classes.grow!}
      classNames={{ input: classes.code! }}
      data-long={short(value).length > LONG}
      placeholder={hint}
      value={own ?? short(value)}
      onChange={(event) => {
        setOwn(event.currentTarget.value);
        onChange(event.currentTarget.value.trim() === "" ? undefined : readShort(event.currentTarget.value));
      }}
      onBlur={() => setOwn(null)}
      spellCheck={false}
      autoComplete="off"
    />
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
