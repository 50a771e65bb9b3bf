import type { ReactNode } from "react";

import classes from "./Twin.module.css";

/** What a picture shows, in figures, for those who want them: folded away until then. */
export function Twin({ title, children }: { title: string; children: ReactNode }) {
  return (
    <details>
      <summary className={classes.title}>{title}</summary>
      {children}
    </details>
  );
}
