import { useQuery } from "@tanstack/react-query";
import { useEffect, useRef, useState } from "react";

import { job } from "../api/queries";
import classes from "./Placement.module.css";

/** Minimum time between two beats, because a job may commit a hundred steps a second. */
const PAUSE_MS = 1000;

/** A light that runs through the layers and back when steps are committed. */
export function Beat({ jobId }: { jobId: string }) {
  const { data: step = 0 } = useQuery({ ...job(jobId), select: (one) => one.step });
  const [beat, setBeat] = useState(0);
  const known = useRef({ step, at: 0 });
  useEffect(() => {
    const { step: before, at } = known.current;
    const now = Date.now();
    if (step === before || now - at < PAUSE_MS) return;
    known.current = { step, at: now };
    setBeat(step);
  }, [step]);
  return beat > 0 && <i key={beat} className={classes.beat} />;
}
