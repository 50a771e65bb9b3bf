/** The configuration of a model that is trained from random weights: either a size, or all fields as YAML. */
import { Input, SegmentedControl, Stack } from "@mantine/core";
import type { ReactNode } from "react";
import { useTranslation } from "react-i18next";

import type { Field } from "../schema/schema";
import classes from "./Form.module.css";
import { useField } from "./form";
import { configOf, parametersOf, sizeOf, SIZES, type Size } from "./modelSizes";

/** `children` is the input for the whole configuration. */
export function ModelConfig({ field, children }: { field: Field; children: ReactNode }) {
  const { t } = useTranslation();
  const { value, set, error } = useField(field);
  const config = typeof value === "object" && value !== null ? (value as Record<string, unknown>) : {};
  const size = sizeOf(config);
  const vocabulary = typeof config.vocab_size === "number" ? config.vocab_size : undefined;
  const names: Record<Size, string> = { tiny: t("Tiny"), small: t("Small"), medium: t("Medium") };
  return (
    <Stack gap="xs">
      <div>
        <SegmentedControl
          aria-label={t("Size of the model")}
          className={classes.alternatives!}
          value={size ?? ""}
          onChange={(next) => set(configOf(next as Size, config))}
          data={SIZES.map((one) => ({
            value: one,
            label: t("{{size}}: {{millions}} M", { size: names[one], millions: Math.round(parametersOf(one, vocabulary) / 1e6) }),
          }))}
        />
        <Input.Description mt={4}>
          {size === null ? t("The configuration below has a size of its own.") : t("Number of parameters (M: a million). A larger model learns more and takes longer.")}
        </Input.Description>
      </div>
      <details className={classes.fold} open={size === null || error !== undefined}>
        <summary>{t("All fields of the configuration")}</summary>
        {children}
      </details>
    </Stack>
  );
}
