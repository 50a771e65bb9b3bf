import { Text } from "@mantine/core";
import type { CSSProperties } from "react";
import { useTranslation } from "react-i18next";

import { Sign, type Tone } from "./MachineNode";
import classes from "./ClusterMap.module.css";

interface Props {
  hasBubbles: boolean;
  isAssumed: boolean;
  isCurrent: boolean;
}

/** Explains the signs, shapes and lines of the map. */
export function Legend({ hasBubbles, isAssumed, isCurrent }: Props) {
  const { t } = useTranslation();
  const tones: [Tone, string][] = [
    ["working", t("at work")],
    ["free", t("ready")],
    ["arriving", t("arriving")],
    ["leaving", t("draining or quarantined")],
    ["lost", t("lost")],
  ];
  return (
    <div className={classes.legend}>
      {!hasBubbles &&
        tones.map(([tone, word]) => (
          <span key={tone} className={classes.entry} data-tone={tone}>
            <svg width={18} height={18} viewBox="-9 -9 18 18" aria-hidden>
              <circle className={classes.body} r={8} />
              <Sign tone={tone} size={8} />
            </svg>
            {word}
          </span>
        ))}
      {!hasBubbles && (
        <>
          <span className={classes.entry} data-tone="working">
            <svg width={50} height={16} viewBox="0 -8 50 16" aria-hidden>
              {[10, 50, 90].map((share, place) => (
                <circle key={share} className={classes.body} data-tone="working" data-busy="" style={{ "--busy": `${share}%` } as CSSProperties} cx={8 + place * 17} r={7} />
              ))}
            </svg>
            {t("lent GPU or CPU threads in use: 10%, 50%, 90%")}
          </span>
          <span className={classes.entry}>
            <svg width={26} height={12} aria-hidden>
              <line className={classes.flow} x1={2} x2={26} y1={6} y2={6} />
            </svg>
            {t("next stage; moves while steps are computed")}
          </span>
        </>
      )}
      <span className={classes.entry}>
        <svg width={26} height={12} aria-hidden>
          <line className={classes.link} data-quality="good" x1={0} x2={26} y1={6} y2={6} strokeWidth={5} />
        </svg>
        {t("over 100 MB/s")}
      </span>
      <span className={classes.entry}>
        <svg width={26} height={12} aria-hidden>
          <line className={classes.link} data-quality="fair" x1={0} x2={26} y1={6} y2={6} strokeWidth={3} />
        </svg>
        {t("over 10 MB/s")}
      </span>
      <span className={classes.entry}>
        <svg width={26} height={12} aria-hidden>
          <line className={classes.link} data-quality="poor" x1={0} x2={26} y1={6} y2={6} strokeWidth={1.5} />
        </svg>
        {t("slower")}
      </span>
      <Text size="xs" c="dimmed">
        {hasBubbles
          ? t("The outer ring is the share of machines at work.")
          : t("Round: CPU, square: GPU. Larger is faster; the ring is the share of lent memory in use.")}
      </Text>
      {isAssumed && (
        <Text size="xs" c="dimmed">
          {t("No link was measured yet: all machines are shown as one island.")}
        </Text>
      )}
      {!isCurrent && (
        <Text size="xs" c="dimmed">
          {t("Islands are being computed again.")}
        </Text>
      )}
    </div>
  );
}
