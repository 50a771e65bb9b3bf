/**
 * The words of the dashboard. English stands where it is used, as the key; `zh/` has the Chinese, one file for
 * each part of the dashboard, and `words.test.ts` holds every word that is used against it. What the server says
 * (reasons, errors, events) is English everywhere.
 */
import i18next from "i18next";
import { initReactI18next } from "react-i18next";

import en from "./en.json";

export const LANGUAGES = { en: "English", zh: "中文" } as const;
export type Language = keyof typeof LANGUAGES;

const NAME = "share-compute.language";

function preferred(): Language {
  const kept = localStorage.getItem(NAME);
  if (kept === "en" || kept === "zh") return kept;
  return navigator.languages.some((tag) => tag.startsWith("zh")) && !navigator.language.startsWith("en") ? "zh" : "en";
}

/** Begin in the language that was chosen last, or that the browser prefers. */
export async function startWords(): Promise<void> {
  await i18next.use(initReactI18next).init({
    lng: "en",
    fallbackLng: "en",
    // Sentences are the keys.
    keySeparator: false,
    nsSeparator: false,
    interpolation: { escapeValue: false },
    resources: { en: { translation: en } },
  });
  await speak(preferred());
}

/** Speak another language from now on. */
export async function speak(language: Language): Promise<void> {
  if (language === "zh" && !i18next.hasResourceBundle("zh", "translation")) {
    i18next.addResourceBundle("zh", "translation", (await import("./zh")).default);
  }
  await i18next.changeLanguage(language);
  document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
}

/** Speak another language from now on, here and the next time. */
export async function choose(language: Language): Promise<void> {
  localStorage.setItem(NAME, language);
  await speak(language);
}

/** The tag by which numbers and dates are written. */
export function locale(): string {
  return i18next.language === "zh" ? "zh-CN" : "en";
}
