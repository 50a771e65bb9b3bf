/** A text area with line numbers; lines with a problem are marked, and the problems are listed below it. */
import { Text } from "@mantine/core";
import { useRef } from "react";
import { useTranslation } from "react-i18next";

import { sentence } from "../../../components/Feedback";
import classes from "./Editor.module.css";
import type { Marked } from "./locate";

interface Props {
  label: string;
  text: string;
  onChange: (text: string) => void;
  problems: readonly Marked[];
}

export function Editor({ label, text, onChange, problems }: Props) {
  const { t } = useTranslation();
  const area = useRef<HTMLTextAreaElement>(null);
  const marked = new Set(problems.map((problem) => problem.line));
  const lines = text.split("\n");

  const goTo = (line: number) => {
    const start = lines.slice(0, line - 1).reduce((sum, one) => sum + one.length + 1, 0);
    area.current?.focus();
    area.current?.setSelectionRange(start, start + (lines[line - 1]?.length ?? 0));
  };

  return (
    <div>
      <div className={classes.frame}>
        <div className={classes.gutter} aria-hidden>
          {lines.map((_, index) => (
            <div key={index} data-marked={marked.has(index + 1)}>
              {index + 1}
            </div>
          ))}
        </div>
        <textarea
          ref={area}
          className={classes.text}
          value={text}
          rows={lines.length + 1}
          onChange={(event) => onChange(event.currentTarget.value)}
          aria-label={label}
          aria-invalid={problems.length > 0}
          aria-describedby={problems.length > 0 ? "problems" : undefined}
          spellCheck={false}
          autoCapitalize="off"
          autoComplete="off"
          wrap="off"
        />
      </div>
      <ul id="problems" className={classes.problems} aria-live="polite">
        {problems.map((problem, index) => (
          <li key={index}>
            <button type="button" className={classes.problem} onClick={() => goTo(problem.line)}>
              <Text component="span" size="sm" fw={600}>
                {t("Line {{line}}", { line: problem.line })}
                {problem.field !== "" && ` · ${problem.field}`}
              </Text>
              <Text component="span" size="sm">
                {sentence(problem.problem)}
              </Text>
            </button>
          </li>
        ))}
      </ul>
    </div>
  );
}
