/** The dashboard's own words in tests. */
import i18next, { type TFunction } from "i18next";

import en from "./en.json";
import chinese from "./zh";

/** Returns the words of a language. */
export async function wordsOf(language: "en" | "zh"): Promise<TFunction> {
  return i18next.createInstance().init({
    lng: language,
    fallbackLng: "en",
    keySeparator: false,
    nsSeparator: false,
    interpolation: { escapeValue: false },
    resources: { en: { translation: en }, zh: { translation: chinese } },
  });
}
