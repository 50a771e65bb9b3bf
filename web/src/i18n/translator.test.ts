import { expect, test } from "vitest";

import shared from "../../../tests/platform/translations/cases.json";
import { Translator } from "./translator";

const translator = new Translator(shared.catalogue);

test.each(shared.cases as [string, string][])("%s", (text, translation) => {
  expect(translator.translate(text)).toBe(translation);
});
