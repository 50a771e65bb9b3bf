/**
 * Texts of the server in the reader's language. The server writes English; the catalogue is loaded only for Chinese.
 */
import i18next from "i18next";

let translate: ((text: string) => string) | undefined;

/** Load the catalogue of Chinese texts, which is also part of the Python package. */
export async function loadTexts(): Promise<void> {
  if (translate !== undefined) return;
  const [{ Translator, remembering }, catalogue] = await Promise.all([
    import("./translator"),
    import("../../../platform/share_compute/translations/zh.json"),
  ]);
  const translator = new Translator(catalogue.default);
  translate = remembering((text) => translator.translate(text));
}

/** A text of the server in the reader's language; unchanged if it has no translation. */
export function translated(text: string): string {
  return translate !== undefined && i18next.language === "zh" ? translate(text) : text;
}
