/** Labels and descriptions of fields: from the schema, or translated into Chinese. */
import { useTranslation } from "react-i18next";

import chinese from "./fieldWords.zh.json";
import type { Field } from "./schema";

const CHINESE: Readonly<Record<string, string>> = chinese;

export function useWords(): { label: (field: Field) => string; help: (field: Field) => string } {
  const { i18n } = useTranslation();
  const said = (text: string) => (i18n.language === "zh" ? (CHINESE[text] ?? text) : text);
  return { label: (field) => said(field.label), help: (field) => said(field.help) };
}
