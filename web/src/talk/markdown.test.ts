import { expect, test } from "vitest";

import { blocksOf, inlineOf, safeHref, type Block, type Inline } from "./markdown";

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

test("hostile texts are parsed in linear time", () => {
  for (const piece of ["> ", "- ", "  - ", "**a", "[a](", "`a", "*a ", "_", "#", "```\n", "1. "]) {
    const blocks = blocksOf(piece.repeat(20_000));
    expect(blocks.length).toBeGreaterThan(0);
  }
});
