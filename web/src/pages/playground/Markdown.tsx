/** Renders an answer as Markdown. It is a separate chunk of the bundle, loaded with the first answer. */
import { Fragment, memo, type ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { CopyBlock } from "../../components/copy/CopyBlock";
import { blocksOf, partsOf, placesOf, type Block, type Inline } from "../../talk/markdown";
import type { Mark } from "../../talk/types";
import classes from "./Markdown.module.css";

interface Props {
  text: string;
  /** Marks in the text: each is shown before the first block that starts at or after the mark. */
  marks: readonly Mark[];
  mark: (mark: Mark) => ReactNode;
}

export function Markdown({ text, marks, mark }: Props) {
  const parts = partsOf(text);
  const places = placesOf(parts, marks);
  const shown = (place: number) => marks.filter((_, index) => places[index] === place).map(mark);
  return (
    <div className={classes.markdown}>
      {parts.map(({ start, end }, index) => (
        <Fragment key={index}>
          {shown(index)}
          <Source text={text.slice(start, end)} />
        </Fragment>
      ))}
      {shown(parts.length)}
    </div>
  );
}

/**
 * One block. It is parsed and rendered again only when its text changes; in a growing answer, only the last block
 * changes.
 */
const Source = memo(function Source({ text }: { text: string }) {
  return <>{blocks(blocksOf(text))}</>;
});

function blocks(content: readonly Block[]): ReactNode {
  return content.map((one, index) => <BlockView key={index} block={one} />);
}

function BlockView({ block }: { block: Block }) {
  const { t } = useTranslation();
  switch (block.kind) {
    case "paragraph":
      return <p>{inline(block.content)}</p>;
    case "heading":
      // Headings of an answer rank below those of the page; their levels are those in the text.
      return (
        <p className={classes.heading} role="heading" aria-level={Math.min(6, block.level + 2)}>
          {inline(block.content)}
        </p>
      );
    case "code":
      return <CopyBlock text={block.text} label={block.language === "" ? t("Code") : t("Code in {{language}}", { language: block.language })} />;
    case "quote":
      return <blockquote>{blocks(block.content)}</blockquote>;
    case "rule":
      return <hr />;
    case "list": {
      const items = block.items.map((item, index) => <li key={index}>{blocks(item)}</li>);
      return block.start === null ? <ul>{items}</ul> : <ol start={block.start}>{items}</ol>;
    }
  }
}

function inline(content: readonly Inline[]): ReactNode {
  return content.map((one, index) => {
    switch (one.kind) {
      case "text":
        return <Fragment key={index}>{one.text}</Fragment>;
      case "code":
        return <code key={index}>{one.text}</code>;
      case "strong":
        return <strong key={index}>{inline(one.content)}</strong>;
      case "em":
        return <em key={index}>{inline(one.content)}</em>;
      case "link":
        return (
          <a key={index} href={one.href} target="_blank" rel="noopener noreferrer nofollow">
            {inline(one.content)}
          </a>
        );
    }
  });
}
