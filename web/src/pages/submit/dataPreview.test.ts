import { MantineProvider } from "@mantine/core";
import i18next from "i18next";
import { createElement } from "react";
import { renderToStaticMarkup } from "react-dom/server";
import { initReactI18next } from "react-i18next";
import { beforeAll, expect, test } from "vitest";

import chinese from "../../i18n/zh";
import { PreviewTable, written } from "./DataPreview";

type Props = Parameters<typeof PreviewTable>[0];

beforeAll(async () => {
  const resources = { en: { translation: {} }, zh: { translation: chinese } };
  await i18next
    .use(initReactI18next)
    .init({ lng: "en", fallbackLng: "en", keySeparator: false, nsSeparator: false, interpolation: { escapeValue: false }, resources });
});

const preview: Props["preview"] = {
  columns: [
    { name: "size", kind: "number", is_target: false },
    { name: "picture", kind: "image", is_target: false },
    { name: "kind", kind: "class", is_target: true },
  ],
  rows: [
    [1 / 3, "AAAA", "<b>a</b>"],
    [null, "BBBB", "b"],
  ],
  left_out: 0,
};
const drawn = (props: Props) => renderToStaticMarkup(createElement(MantineProvider, null, createElement(PreviewTable, props)));

test("columns have their types, rows their values, and a caption says what they are", () => {
  const html = drawn({ task: undefined, preview });
  expect(html).toContain("<caption>Rows of the first file</caption>");
  expect([...html.matchAll(/<th scope="col" data-kind="\w+">(\w+)<span[^>]*>([^<]*)</g)].map(([, name, kind]) => [name, kind])).toEqual([
    ["size", "number"],
    ["picture", "image"],
    ["kind", "class, target"],
  ]);
  expect(html.match(/<tr>/g)).toHaveLength(3);
  expect(html).toContain('<td data-kind="number">0.333333</td>');
  expect(html).toContain('<td data-kind="number">–</td>');
  expect(html).toContain('src="data:image/png;base64,BBBB" alt="image of row 2"');
});

test("numbers are whole", () => {
  expect([1 / 3, 20261129, -0.5, 1234567.891, 1e-7].map(written)).toEqual(["0.333333", "20261129", "-0.5", "1234568", "1e-7"]);
});

test("texts of files stay texts", () => {
  expect(drawn({ task: undefined, preview })).toContain("&lt;b&gt;a&lt;/b&gt;");
});

test("a table among several names its task, and says how many features are left out", async () => {
  const html = drawn({ task: "digit", preview: { ...preview, left_out: 12 } });
  expect(html).toContain("Rows of the first file of task digit");
  await i18next.changeLanguage("zh");
  const translated = drawn({ task: "digit", preview: { ...preview, left_out: 12 } });
  await i18next.changeLanguage("en");
  expect(translated).toContain("类别，目标");
  expect(translated).toContain("另有 12 个特征");
});
