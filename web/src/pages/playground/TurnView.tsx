import { Button, Text } from "@mantine/core";
import { memo } from "react";
import { useTranslation } from "react-i18next";

import type { Served } from "../../talk/conversation";
import type { Turn } from "../../talk/types";
import { AnswerView } from "./AnswerView";
import classes from "./Playground.module.css";

interface Props {
  turn: Turn;
  isLast: boolean;
  served: Served;
  onEdit: (() => void) | undefined;
}

/** One prompt and the answers of the models. */
export const TurnView = memo(
  function TurnView({ turn, isLast, served, onEdit }: Props) {
    const { t } = useTranslation();
    return (
      <article className={classes.turn}>
        <div className={classes.prompt}>
          <Text size="xs" c="dimmed" fw={600}>
            {t("You")}
          </Text>
          <p className={classes.text}>{turn.prompt}</p>
          {isLast && onEdit !== undefined && (
            <Button size="compact-xs" variant="subtle" onClick={onEdit}>
              {t("Edit")}
            </Button>
          )}
        </div>
        <div className={classes.answers} data-columns={turn.answers.length}>
          {turn.answers.map((answer) => (
            <AnswerView key={answer.model} turnId={turn.id} answer={answer} isLast={isLast} served={served} />
          ))}
        </div>
      </article>
    );
  },
  // An earlier turn is not rendered again for each token of the last one.
  (before, after) =>
    before.turn === after.turn &&
    before.isLast === after.isLast &&
    before.served === after.served &&
    (before.onEdit === undefined) === (after.onEdit === undefined),
);
