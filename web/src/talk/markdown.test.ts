import { expect, test } from "vitest";

import { blocksOf, inlineOf, partsOf, placesOf, safeHref, type Block, type Inline } from "./markdown";

const plain = (content: Inline[]): string => content.map((one) => ("text" in one ? one.text : plain(one.content))).join("");
const kinds = (text: string) => blocksOf(text).map((one) => one.kind);

test("blocks are told apart", () => {
  expect(kinds("# Title\ntext\nmore\n\n- a\n- b\n\n1. x\n2) y\n\n> said\n\n---\n```py\nx = 1\n```")).toEqual([
    "heading", "paragraph", "list", "list", "quote", "rule", "code",
  ]);
});

test("code keeps its text, also while it is written", () => {
  const [block] = blocksOf("```python\n# no heading\n\n- no list **b**\n");
  expect(block).toEqual({ kind: "code", language: "python", text: "# no heading\n\n- no list **b**\n" });
  expect(blocksOf("~~~~\n~~~\n~~~~\nafter").map((one) => one.kind)).toEqual(["code", "paragraph"]);
});

test("lists hold lists, paragraphs and code", () => {
  const [list] = blocksOf("- a\n  - b\n\n  more\n- c\n  ```\n  x\n  ```") as [Extract<Block, { kind: "list" }>];
  expect(list.items.map((item) => item.map((one) => one.kind))).toEqual([["paragraph", "list", "paragraph"], ["paragraph", "code"]]);
  expect(blocksOf("3. c\n4. d")).toMatchObject([{ kind: "list", start: 3 }]);
});

test("text has code, links and emphasis, and no HTML", () => {
  expect(inlineOf("a `b*c*` **d _e_** [f](https://g.example/h)").map((one) => one.kind)).toEqual([
    "text", "code", "text", "strong", "text", "link",
  ]);
  expect(inlineOf("<b>x</b> snake_case_name 2 * 3 * 4")).toEqual([{ kind: "text", text: "<b>x</b> snake_case_name 2 * 3 * 4" }]);
});

test("links lead to pages and mailboxes alone", () => {
  for (const href of ["javascript:alert(1)", "data:text/html,x", "/jobs", "vbscript:x", "file:///etc/passwd", "JaVaScRiPt:x"]) {
    expect(safeHref(href)).toBeNull();
    expect(plain(inlineOf(`[x](${href})`))).toContain(href);
  }
  expect(safeHref("https://a.example")).toBe("https://a.example/");
});

test("a text without Markdown stays as it is", () => {
  const text = "one line\nand another\n\nparagraph";
  expect(blocksOf(text).map((one) => (one.kind === "paragraph" ? plain(one.content) : "")).join("\n\n")).toBe(text);
});

test("emphasis of one character, of both kinds, and around underscores", () => {
  expect(inlineOf("**a** *b_c_d* ***e***")).toEqual([
    { kind: "strong", content: [{ kind: "text", text: "a" }] },
    { kind: "text", text: " " },
    { kind: "em", content: [{ kind: "text", text: "b_c_d" }] },
    { kind: "text", text: " " },
    { kind: "strong", content: [{ kind: "em", content: [{ kind: "text", text: "e" }] }] },
  ]);
  expect(inlineOf("```a` `b``c`")).toMatchObject([{ text: "```a" }, { kind: "code", text: " " }, { text: "b``c`" }]);
});

test("headings may be closed, and lines end in three ways", () => {
  expect(blocksOf("# a ##\r\n## C#\r### b")).toEqual([
    { kind: "heading", level: 1, content: [{ kind: "text", text: "a" }] },
    { kind: "heading", level: 2, content: [{ kind: "text", text: "C#" }] },
    { kind: "heading", level: 3, content: [{ kind: "text", text: "b" }] },
  ]);
});

test("each block is parsed alone as in its text, and marks are between blocks", () => {
  const text = "one\ntwo\n\n```py\nx = 1\n\ny = 2\n```\r\n3. a\n\n   b\n4. c\n\n> q\n---\nend";
  const parts = partsOf(text);
  expect(parts.flatMap(({ start, end }) => blocksOf(text.slice(start, end)))).toEqual(blocksOf(text));
  expect(parts.map(({ block }) => block().kind)).toEqual(["paragraph", "code", "list", "quote", "rule", "paragraph"]);
  const inCode = text.indexOf("x = 1");
  const places = placesOf(parts, [0, 3, 4, inCode, text.length, Number.MAX_SAFE_INTEGER].map((at) => ({ at })));
  expect(places).toEqual([0, 1, 1, 2, 6, 6]);
});

// A parser that takes quadratic time needs minutes for these.
test("hostile texts of 100 kB are parsed", () => {
  const long = " ".repeat(100_000);
  expect(blocksOf(`# ${long}\rx`).map((one) => one.kind)).toEqual(["heading", "paragraph"]);
  expect(blocksOf(`# ${long}x\u2028`)).toEqual([{ kind: "heading", level: 1, content: [{ kind: "text", text: "x" }] }]);
  expect(blocksOf(`- ${long}x\u2028y`).map((one) => one.kind)).toEqual(["list"]);
  expect(blocksOf(`#${" #".repeat(50_000)}x`).map((one) => one.kind)).toEqual(["heading"]);
  for (const piece of ["**a ", "__a ", "*a ", "_a ", "`a``", "[a](b ", "[", "[a](", "``` ", "*", "_", "`", "** a", "a\r"]) {
    const text = piece.repeat(Math.ceil(100_000 / piece.length));
    expect(plain(inlineOf(text)).length).toBeGreaterThan(0);
    expect(blocksOf(text).length).toBeGreaterThan(0);
  }
  const growing = Array.from({ length: 440 }, (_, length) => "`".repeat(length + 1)).join(" ");
  expect(plain(inlineOf(growing))).toBe(growing);
  for (const piece of ["> ", "- ", "  - ", "#", "```\n", "1. ", "- - ", "~~~ "]) {
    expect(blocksOf(piece.repeat(50_000)).length).toBeGreaterThan(0);
  }
}, 60_000);
