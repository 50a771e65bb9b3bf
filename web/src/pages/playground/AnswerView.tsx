import { Button, Text } from "@mantine/core";
import { Fragment, Suspense } from "react";
import { useTranslation } from "react-i18next";

import { CopyButton } from "../../components/copy/CopyButton";
import { sentence } from "../../components/Feedback";
import { AnchorLink } from "../../components/links";
import { count, stepTime } from "../../format";
import { translated } from "../../i18n/texts";
import { lazyPart } from "../../lazy";
import { joined } from "../../placement/layout";
import { conversation, type Served } from "../../talk/conversation";
import { cut } from "../../talk/marks";
import { isRunning, type Answer, type Mark } from "../../talk/types";
import classes from "./Playground.module.css";

const Markdown = lazyPart(async () => (await import("./Markdown")).Markdown);

interface Props {
  turnId: string;
  answer: Answer;
  isLast: boolean;
  served: Served;
}

/** The answer of one model: its text with marks where machines were lost, statistics, and actions. */
export function AnswerView({ turnId, answer, isLast, served }: Props) {
  const { t } = useTranslation();
  const lossMark = (mark: Mark) => <LossMark key={mark.key} mark={mark} isOver={!isRunning(answer)} />;
  const plain = cut(answer.text, answer.marks).map(({ before, piece }, index) => (
    <Fragment key={index}>
      {before.map(lossMark)}
      {piece}
    </Fragment>
  ));
  return (
    <section className={`card ${classes.answer}`} aria-label={t("Answer of {{model}}", { model: answer.model })} aria-busy={isRunning(answer)}>
      <AnchorLink to="/deployments/$name" params={{ name: answer.model }} size="xs" fw={600}>
        {answer.model}
      </AnchorLink>
      {answer.isPlain && (
        <Text size="xs" c="dimmed">
          {t("This model has no chat template: it continues the text as it is.")}
        </Text>
      )}
      <div className={classes.text} data-testid="answer">
        {/* A model without a chat template continues a text, which may not be Markdown. */}
        {answer.isPlain || answer.text === "" ? (
          plain
        ) : (
          <Suspense fallback={plain}>
            <Markdown text={answer.text} marks={answer.marks} mark={lossMark} />
          </Suspense>
        )}
        {isRunning(answer) && <span className={classes.cursor} aria-hidden />}
      </div>
      {isRunning(answer) && (answer.isReconnecting || answer.wait !== "") && (
        <Text size="sm" className={classes.wait} role="status">
          {answer.isReconnecting
            ? t("reconnecting to the server")
            : answer.marks.some((mark) => mark.seconds === null)
              ? t("paused while the stages re-form")
              : sentence(answer.wait)}
        </Text>
      )}
      {answer.problem !== null && <Problem answer={answer} />}
      <Figures answer={answer} />
      <Actions turnId={turnId} answer={answer} isLast={isLast} served={served} />
    </section>
  );
}

/** Drawn unobtrusively: a loss costs time only. */
function LossMark({ mark, isOver }: { mark: Mark; isOver: boolean }) {
  const { t } = useTranslation();
  const names = joined(mark.machines);
  const went = mark.seconds !== null || isOver;
  const what =
    mark.machines.length === 0
      ? translated(mark.reason)
      : mark.machines.length === 1
        ? t("{{names}} was lost here", { names })
        : t("{{names}} were lost here", { names });
  return (
    <span className={classes.mark} role="note">
      {what}
      {went && `; ${t("the answer continues")}`}
      {mark.seconds !== null && ` (${t("after {{time}}", { time: stepTime(mark.seconds) })})`}
    </span>
  );
}

function Problem({ answer: { state, problem } }: { answer: Answer }) {
  const { t } = useTranslation();
  return (
    <div className={classes.problem} data-state={state}>
      <Text size="sm" fw={600}>
        {state === "broken" ? t("The answer broke off: {{why}}", { why: sentence(problem!.message) }) : sentence(problem!.message)}
      </Text>
      {problem!.hint !== undefined && state !== "broken" && <Text size="sm">{sentence(problem!.hint)}</Text>}
    </div>
  );
}

function Figures({ answer }: { answer: Answer }) {
  const { t } = useTranslation();
  const { firstTokenS, writingS, tokens, isCounted, finish, state } = answer;
  if (firstTokenS === null) {
    return state === "waiting" && answer.wait === "" ? (
      <Text size="xs" c="dimmed">
        {t("waiting for the first token")}
      </Text>
    ) : null;
  }
  const words = [t("first token {{time}}", { time: stepTime(firstTokenS) })];
  if (writingS > 0 && tokens > 1) words.push(t("{{rate}} tokens/s", { rate: ((tokens - 1) / writingS).toFixed(1) }));
  words.push(isCounted ? t("{{tokens}} tokens", { tokens: count(tokens) }) : t("about {{tokens}} tokens", { tokens: count(tokens) }));
  if (finish === "length") words.push(t("stopped at its limit of tokens"));
  if (state === "stopped") words.push(t("stopped"));
  return (
    <Text size="xs" c="dimmed" title={t("seed {{seed}}", { seed: answer.seed })}>
      {words.join(" · ")}
    </Text>
  );
}

function Actions({ turnId, answer, isLast, served }: Props) {
  const { t } = useTranslation();
  if (isRunning(answer)) return null;
  const canGoOn = isLast && (answer.state === "broken" || (answer.state === "failed" && answer.text !== ""));
  return (
    <div className={classes.actions}>
      {canGoOn && (
        <Button size="compact-sm" onClick={() => conversation.goOn(turnId, answer.model, served)}>
          {t("Continue")}
        </Button>
      )}
      {isLast && (
        <Button size="compact-sm" variant="subtle" onClick={() => conversation.regenerate(turnId, answer.model, served)}>
          {t("Regenerate")}
        </Button>
      )}
      {answer.text !== "" && <CopyButton text={answer.text} size="compact-sm" variant="subtle" />}
    </div>
  );
}
