/** Chat with one to three models side by side, each with the same prompts. */
import { Button, Stack, Text } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { Suspense, useCallback, useEffect, useMemo, useRef, useState, useSyncExternalStore } from "react";
import { useTranslation } from "react-i18next";

import { deployments, servedModels } from "../api/queries";
import type { Deployment } from "../api/types";
import { Empty, Failure, Loading } from "../components/Feedback";
import { Page } from "../components/frame/Page";
import { ButtonLink } from "../components/links";
import { lazyPart } from "../lazy";
import { conversation } from "../talk/conversation";
import { isRunning, type Turn } from "../talk/types";
import { Announcer } from "./playground/Announcer";
import { Composer } from "./playground/Composer";
import { Conversations } from "./playground/Conversations";
import { ModelPicker } from "./playground/ModelPicker";
import { Parameters } from "./playground/Parameters";
import classes from "./playground/Playground.module.css";
import { TurnView } from "./playground/TurnView";
import { useFollowedEnd } from "./playground/useFollowedEnd";

const Programs = lazyPart(async () => (await import("./playground/Programs")).Programs);
const route = getRouteApi("/playground");
const MOST_MODELS = 3;

export function Playground() {
  const { t } = useTranslation();
  const query = useInfiniteQuery(deployments("up"));
  const up = query.data?.pages.flatMap((page) => page.deployments);
  if (up === undefined) {
    return (
      <Page title={t("Playground")}>
        {query.error === null ? <Loading /> : <Failure error={query.error} retry={() => void query.refetch()} />}
      </Page>
    );
  }
  return <Talking up={up} />;
}

function Talking({ up }: { up: readonly Deployment[] }) {
  const { t } = useTranslation();
  const navigate = route.useNavigate();
  const search = route.useSearch();
  const { data: models } = useQuery(servedModels);
  const { id, turns, settings } = useSyncExternalStore(conversation.subscribe, conversation.snapshot);
  const [isEditing, setEditing] = useState(false);

  const encoders = useMemo(() => new Set(models?.filter((one) => one.kind === "embed").map((one) => one.id)), [models]);
  const served = useMemo(() => new Map(models?.map((one) => [one.id, one])), [models]);
  const offered = useMemo(() => up.filter((one) => !encoders.has(one.name)).sort(readyFirst), [up, encoders]);
  const chosen = useMemo(
    () => search.with?.split(",").filter((name) => name !== "").slice(0, MOST_MODELS) ?? offered.slice(0, 1).map((one) => one.name),
    [search.with, offered],
  );

  const running = turns.some((turn) => turn.answers.some(isRunning));
  const end = useFollowedEnd(turns);
  const stop = useCallback(() => conversation.stop(), []);
  const endEditing = useCallback(() => setEditing(false), []);
  useEscape(running, stop);

  const send = (prompt: string) => {
    conversation.send(prompt, chosen, served, isEditing);
    setEditing(false);
    end.follow();
  };
  const last = turns.at(-1);
  const isIdle = turns.length === 0 && offered.length === 0;
  return (
    <Page
      title={t("Playground")}
      actions={
        turns.length > 0 && (
          <Button
            variant="default"
            onClick={() => {
              conversation.begin();
              setEditing(false);
            }}
          >
            {t("New conversation")}
          </Button>
        )
      }
    >
      <div className={classes.layout}>
        <Conversations current={id} onChange={endEditing} />
        <Stack gap="lg" className={classes.talk!}>
          <Stack gap="sm">
            {offered.length > 0 && (
              <ModelPicker
                offered={offered}
                chosen={chosen}
                most={MOST_MODELS}
                onChange={(names) => void navigate({ search: { with: names.join(",") }, replace: true })}
              />
            )}
            {!isIdle && (
              <div className={classes.tools}>
                <Parameters settings={settings} onChange={(next) => conversation.set(next)} />
                {chosen.length > 0 && (
                  <Suspense>
                    <Programs models={chosen} turns={turns} settings={settings} served={served} />
                  </Suspense>
                )}
              </div>
            )}
          </Stack>
          {isIdle ? (
            <Empty title={t("No text model is served")}>
              <Text>{t("Deploy one, and talk to it here.")}</Text>
              <ButtonLink to="/models">
                {t("Deploy a model")}
              </ButtonLink>
            </Empty>
          ) : (
            <>
              <section aria-label={t("Conversation")} className={classes.conversation}>
                {turns.length === 0 && (
                  <Text c="dimmed" size="sm">
                    {t("Conversations are kept in this browser until you sign out or delete them. With several models each answers for itself.")}
                  </Text>
                )}
                {turns.map((turn) => (
                  <TurnView
                    key={turn.id}
                    turn={turn}
                    isLast={turn === last}
                    served={served}
                    onEdit={running ? undefined : () => setEditing(true)}
                  />
                ))}
                <div ref={end.ref} />
              </section>
              <Composer
                // When a prompt is edited, it replaces the draft.
                key={isEditing ? last?.id : id}
                start={isEditing ? promptOf(last) : ""}
                isEditing={isEditing}
                isRunning={running}
                canSend={chosen.length > 0}
                onSend={send}
                onStop={stop}
                onCancel={() => setEditing(false)}
              />
            </>
          )}
        </Stack>
      </div>
      <Announcer turns={turns} />
    </Page>
  );
}

function promptOf(turn: Turn | undefined): string {
  return turn?.prompt ?? "";
}

function readyFirst(one: Deployment, other: Deployment): number {
  return Number(other.state === "ready") - Number(one.state === "ready");
}

/** Escape stops the answers, unless it closes a dialog or cancels the renaming of a conversation. */
function useEscape(isActive: boolean, stop: () => void) {
  const latest = useRef(stop);
  latest.current = stop;
  useEffect(() => {
    if (!isActive) return;
    const listen = (event: KeyboardEvent) => {
      if (event.key === "Escape" && !event.isComposing && !event.defaultPrevented && !isInDialog(event)) latest.current();
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, [isActive]);
}

/** Whether a dialog is open, or was closed by this key. */
function isInDialog({ target }: KeyboardEvent): boolean {
  const isInside = target instanceof Element && target.closest('[role="dialog"]') !== null;
  return isInside || document.querySelector('[aria-modal="true"]') !== null;
}
