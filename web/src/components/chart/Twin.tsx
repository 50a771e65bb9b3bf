import type { ReactNode } from "react";

import classes from "./Twin.module.css";

/** The content of a picture as text or a table; collapsed at first. */
export function Twin({ title, children }: { title: string; children: ReactNode }) {
  return (
    <details>
      <summary className={classes.title}>{title}</summary>
      {children}
    </details>
  );
}
