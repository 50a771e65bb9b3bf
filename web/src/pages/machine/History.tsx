/** All events of a machine, newest first. */
import { Button, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import type { TFunction } from "i18next";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import { heldBy } from "../../api/events/clusterEvents";
import { machineHistory } from "../../api/queries";
import type { ContributorState, ClusterEvent } from "../../api/types";
import { sentence, Waiting } from "../../components/Feedback";
import { StateBadge } from "../../components/StateBadge";
import { count, dateAndClock, dateAndTime } from "../../format";
import { Holder } from "../../cluster/MachineTable";
import { partWords } from "../../cluster/words";
import classes from "./Machine.module.css";

const AT_ONCE = 30;

export function History({ machineId }: { machineId: string }) {
  const { t } = useTranslation();
  const { data: events, error, refetch } = useQuery(machineHistory(machineId));
  const [most, setMost] = useState(AT_ONCE);
  if (events === undefined) return <Waiting error={error} refetch={refetch} lines={2} />;
  const shown = events.slice(-most).reverse();
  return (
    <>
      <ol className={classes.events}>
        {shown.map((event) => (
          <li key={event.seq} className={classes.event}>
            <Text size="xs" c="dimmed" component="time" dateTime={event.at} title={dateAndTime(event.at)}>
              {dateAndClock(event.at)}
            </Text>
            <Story t={t} event={event} />
          </li>
        ))}
      </ol>
      {events.length > most && (
        <Button variant="default" size="xs" onClick={() => setMost(most + 200)}>
          {t("Show older ({{number}} more)", { number: count(events.length - most) })}
        </Button>
      )}
    </>
  );
}

function Story({ t, event }: { t: TFunction; event: ClusterEvent }) {
  if (event.kind === "contributor") {
    const { state, reason } = event.data as { state: ContributorState; reason: string };
    return (
      <Text size="sm" component="div">
        <StateBadge state={state} /> {sentence(reason)}
      </Text>
    );
  }
  const held = heldBy(event.data);
  if (held === null) return <Text size="sm">{t("It is free again.")}</Text>;
  const part = partWords(t, held);
  return (
    <Text size="sm" component="div">
      {part === null ? t("It is lent to") : t("It holds {{part}} of", { part })} <Holder held={held} isInText />
    </Text>
  );
}
