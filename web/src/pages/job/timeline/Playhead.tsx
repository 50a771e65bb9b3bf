/** Plays the step over its timeline: a line that moves with time, and the phase of each stage at that moment. */
import { Button, Group, Text } from "@mantine/core";
import { useReducedMotion } from "@mantine/hooks";
import { useEffect, useMemo, useRef, useState, type RefObject } from "react";
import { useTranslation } from "react-i18next";

import type { Plan } from "../../../api/types";
import { stepTime } from "../../../format";
import { layerRange } from "../../../placement/layout";
import { showPhases, type Phase } from "../../../placement/phases";
import { momentsOf, placeOf, playedSeconds, stagesOf } from "./playback";
import type { Row } from "./timeline";
import classes from "./Timeline.module.css";

interface Props {
  plan: Plan;
  rows: readonly Row[];
  /** Predicted seconds of the step; the timeline uses the same scale. */
  step: number;
  /** Measured seconds of the last steps; undefined before the first measurement. */
  measured: number | undefined;
  /** The line over the timeline; it moves to the present moment. */
  line: RefObject<SVGLineElement | null>;
  /** Width of the timeline's time, in pixels. */
  span: number;
  /** Whether it plays automatically: while the job runs. */
  isRunning: boolean;
}

export function Playhead({ plan, rows, step, measured, line, span, isRunning }: Props) {
  const { t } = useTranslation();
  const isStill = useReducedMotion(undefined, { getInitialValueInEffect: false });
  const [wanted, setWanted] = useState<boolean | null>(null);
  const isPlaying = !isStill && (wanted ?? isRunning);
  const moments = useMemo(() => momentsOf(rows), [rows]);
  const stages = useMemo(() => stagesOf(rows), [rows]);
  const [place, setPlace] = useState(0);
  const holder = useRef<HTMLDivElement>(null);
  const real = measured ?? step;
  const played = playedSeconds(real);

  useEffect(() => {
    const [mark, frame] = [line.current, holder.current];
    if (!isPlaying || mark === null || frame === null) return;
    let request = 0;
    let shown = -1;
    const begin = performance.now();
    const draw = (now: number) => {
      const share = ((Math.max(0, now - begin) / 1000) % played) / played;
      mark.style.transform = `translateX(${(share * span).toFixed(1)}px)`;
      const next = placeOf(moments, share * step);
      if (next !== shown) {
        setPlace((shown = next));
        showPhases(new Map(moments[next]!.stages.map(({ phase }, index) => [stages[index]!, phase])));
      }
      request = requestAnimationFrame(draw);
    };
    // A hidden tab gets no frames; content that is scrolled out of sight is not drawn either.
    const observer = new IntersectionObserver(([entry]) => {
      cancelAnimationFrame(request);
      if (entry?.isIntersecting) request = requestAnimationFrame(draw);
      else showPhases(new Map());
    });
    observer.observe(frame);
    mark.style.display = "inline";
    return () => {
      observer.disconnect();
      cancelAnimationFrame(request);
      showPhases(new Map());
    };
  }, [isPlaying, moments, stages, played, span, step, line]);

  if (isStill) return null;
  const words = (phase: Phase, members: number): string => {
    const names: Record<Phase, string> = {
      F: t("forward"),
      B: t("backward"),
      update: members > 1 ? t("all-reduce and update") : t("update of weights"),
      waiting: t("waiting"),
    };
    return names[phase];
  };
  const speed =
    played > real * 1.05
      ? t("slowed down {{times}} times", { times: (played / real).toPrecision(2) })
      : t("played at its own speed");
  return (
    <div ref={holder} className={classes.playback}>
      <Group gap="sm">
        <Button size="compact-sm" variant="default" onClick={() => setWanted(!isPlaying)}>
          {isPlaying ? t("Pause the step") : t("Play the step")}
        </Button>
        <Text size="xs" c="dimmed">
          {measured === undefined
            ? t("The predicted step of {{time}}, {{speed}}.", { time: stepTime(real), speed })
            : t("The schedule of the plan, stretched to the {{time}} that the last steps took, {{speed}}. The times of single cells are computed, not measured.", { time: stepTime(real), speed })}
        </Text>
      </Group>
      <ul className={classes.phases} aria-hidden={isPlaying}>
        {stages.map((stage, index) => {
          const now = moments[place]?.stages[index];
          const shape = plan.stages[stage];
          if (now === undefined || shape === undefined) return null;
          return (
            <li key={stage} data-hue={stage % 6} data-phase={now.phase}>
              <strong>{layerRange(shape)}</strong>
              <span>
                {words(now.phase, shape.members.length)} {now.microbatches.join(", ")}
              </span>
            </li>
          );
        })}
      </ul>
    </div>
  );
}
