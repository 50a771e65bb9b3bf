/** Chooses from many columns or fields: with a search; fields that differ between the jobs come first. */
import "@mantine/core/styles/Checkbox.css";
import "@mantine/core/styles/Popover.css";

import { Button, Checkbox, Popover, Text, TextInput } from "@mantine/core";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import { nameOfColumn, PROPERTIES, type ColumnKey, type Fields, type Property } from "./columns";
import classes from "./Runs.module.css";

interface Props {
  /** Text of the button. */
  title: string;
  fields: Fields;
  /** Names of the results. */
  results: readonly string[];
  /** Whether only fields can be chosen. */
  isOfFields?: boolean;
  shown: readonly ColumnKey[];
  onChange: (shown: ColumnKey[]) => void;
  /** Restores the default; undefined if the default is shown. */
  onReset: (() => void) | undefined;
}

export function ColumnsMenu({ title, fields, results, isOfFields = false, shown, onChange, onReset }: Props) {
  const { t } = useTranslation();
  const [sought, setSought] = useState("");
  const spec = (name: string): ColumnKey => `spec.${name}`;
  const sections: [string, ColumnKey[]][] = [
    [t("Fields that differ"), fields.differing.map(spec)],
    ...(isOfFields
      ? []
      : ([
          [t("Results"), results.map((name) => `results.${name}`)],
          [t("Job"), Object.keys(PROPERTIES) as Property[]],
          [t("Other fields"), fields.equal.map(spec)],
        ] as [string, ColumnKey[]][])),
  ];
  const textOf = (column: ColumnKey) => (column.startsWith("spec.") ? column.slice("spec.".length) : nameOfColumn(column, [], t));
  const isFound = (column: ColumnKey) => `${textOf(column)} ${column}`.toLowerCase().includes(sought.trim().toLowerCase());
  const found = sections.map(([name, columns]) => [name, columns.filter(isFound)] as const).filter(([, columns]) => columns.length > 0);
  return (
    <Popover position="bottom-end" width={320} trapFocus returnFocus shadow="md" onClose={() => setSought("")} keepMounted={false}>
      <Popover.Target>
        <Button size="xs" variant="default">
          {title}
        </Button>
      </Popover.Target>
      <Popover.Dropdown className={classes.menu} aria-label={title}>
        <TextInput size="xs" type="search" aria-label={t("Search")} placeholder={t("Search")} value={sought} onChange={(event) => setSought(event.currentTarget.value)} data-autofocus />
        <div className={classes.choices}>
          {found.map(([name, columns]) => (
            <fieldset key={name} className={classes.section}>
              <legend>{name}</legend>
              {columns.map((column) => (
                <Checkbox
                  key={column}
                  size="xs"
                  label={textOf(column)}
                  checked={shown.includes(column)}
                  onChange={(event) => onChange(event.currentTarget.checked ? [...shown, column] : shown.filter((one) => one !== column))}
                />
              ))}
            </fieldset>
          ))}
          {found.length === 0 && (
            <Text size="sm" c="dimmed">
              {t("No match.")}
            </Text>
          )}
        </div>
        <div className={classes.row}>
          {onReset !== undefined && (
            <Button size="compact-xs" variant="default" onClick={onReset}>
              {t("Default")}
            </Button>
          )}
          {fields.differing.length > 0 && (
            <Button size="compact-xs" variant="default" onClick={() => onChange([...new Set([...shown, ...fields.differing.map(spec)])])}>
              {t("All that differ")}
            </Button>
          )}
        </div>
      </Popover.Dropdown>
    </Popover>
  );
}
