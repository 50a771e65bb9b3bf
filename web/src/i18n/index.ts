/**
 * The dashboard's translations. English texts are the keys, written where they are used. `zh/` has the Chinese, one
 * file for each part of the dashboard; `words.test.ts` checks that every key has one. The server writes its texts (reasons,
 * errors, events) in English; `translated` and `sentence` render them in the reader's language.
 */
import i18next from "i18next";
import { initReactI18next } from "react-i18next";

import { keep, kept } from "../kept";
import { withRetries } from "../lazy";
import en from "./en.json";
import { loadTexts } from "./texts";

export const LANGUAGES = { en: "English", zh: "中文" } as const;
export type Language = keyof typeof LANGUAGES;

const NAME = "share-compute.language";

function preferred(): Language {
  const chosen = kept(NAME);
  if (chosen === "en" || chosen === "zh") return chosen;
  return navigator.languages.some((tag) => tag.startsWith("zh")) && !navigator.language.startsWith("en") ? "zh" : "en";
}

/** Start with the language that was chosen last, or else with the browser's preferred language. */
export async function startWords(): Promise<void> {
  await i18next.use(initReactI18next).init({
    lng: "en",
    fallbackLng: "en",
    // Whole sentences are the keys.
    keySeparator: false,
    nsSeparator: false,
    interpolation: { escapeValue: false },
    resources: { en: { translation: en } },
  });
  await speak(preferred()).catch(() => speak("en"));
}

/** Switch to another language. */
export async function speak(language: Language): Promise<void> {
  if (language === "zh" && !i18next.hasResourceBundle("zh", "translation")) {
    const [words] = await withRetries(() => Promise.all([import("./zh"), loadTexts()]));
    i18next.addResourceBundle("zh", "translation", words.default);
  }
  await i18next.changeLanguage(language);
  document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
}

/** Switch to another language, and remember it. */
export async function choose(language: Language): Promise<void> {
  keep(NAME, language);
  await speak(language);
}

/** Locale tag for numbers and dates. */
export function locale(): string {
  return i18next.language === "zh" ? "zh-CN" : "en";
}
