import { ActionIcon, Table, Text } from "@mantine/core";
import { memo, type CSSProperties } from "react";
import { useTranslation } from "react-i18next";

import type { Curve } from "../../components/chart/CurveChart";
import { AnchorLink } from "../../components/links";
import classes from "./Compare.module.css";
import { valuesAt } from "./curves";

/** A compared job, with the name and colour that identify it in all pictures. */
export interface ComparedRun {
  id: string;
  name: string;
  colour: string;
}

interface Props {
  runs: readonly ComparedRun[];
  curves: readonly Curve[];
  /** The step under the pointer, and its index; null for the last step of each run. */
  step: number | null;
  point: number | null;
  format: (value: number) => string;
  hidden: readonly string[];
  lit: number | null;
  onLight: (place: number | null) => void;
  onHide: (ids: string[]) => void;
  onRemove: (id: string) => void;
}

/** All runs with their values: hovering or focusing a run highlights its curves. */
export const RunLegend = memo(function RunLegend({ runs, curves, step, point, format, hidden, lit, onLight, onHide, onRemove }: Props) {
  const { t } = useTranslation();
  const values = valuesAt(curves, point);
  const written = (value: number | null | undefined) => (value === null || value === undefined ? "–" : format(value));
  return (
    <div className={classes.legend} tabIndex={0} role="group" aria-label={t("Compared jobs")}>
      <Table verticalSpacing={2} horizontalSpacing={6}>
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{step === null ? t("last step") : t("step {{step}}", { step })}</Table.Th>
            <Table.Th className="numeric">{t("training")}</Table.Th>
            <Table.Th className="numeric">{t("validation")}</Table.Th>
            <Table.Td />
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody onPointerLeave={() => onLight(null)}>
          {runs.map(({ id, name, colour }, place) => {
            const isHidden = hidden.includes(id);
            const value = values.get(place);
            return (
              <Table.Tr key={id} data-lit={lit === place} data-hidden={isHidden} onPointerEnter={() => onLight(place)} onFocus={() => onLight(place)} onBlur={() => onLight(null)}>
                <Table.Th scope="row">
                  <button
                    type="button"
                    className={classes.swatch}
                    style={{ "--run": colour } as CSSProperties}
                    aria-pressed={!isHidden}
                    aria-label={t("Show {{name}}", { name })}
                    onClick={() => onHide(isHidden ? hidden.filter((one) => one !== id) : [...hidden, id])}
                  />
                  <AnchorLink to="/jobs/$jobId" params={{ jobId: id }} size="xs" className={classes.run} title={name}>
                    {name}
                  </AnchorLink>
                </Table.Th>
                <Table.Td className="numeric">{isHidden ? "" : written(value?.train)}</Table.Td>
                <Table.Td className="numeric">{isHidden ? "" : written(value?.validation)}</Table.Td>
                <Table.Td>
                  <ActionIcon size="xs" variant="subtle" color="gray" aria-label={t("Without {{name}}", { name })} onClick={() => onRemove(id)}>
                    ×
                  </ActionIcon>
                </Table.Td>
              </Table.Tr>
            );
          })}
        </Table.Tbody>
      </Table>
      {hidden.length > 0 && (
        <Text size="xs" c="dimmed" p="xs">
          {t("Press a colour to show or hide its curves.")}
        </Text>
      )}
    </div>
  );
});
