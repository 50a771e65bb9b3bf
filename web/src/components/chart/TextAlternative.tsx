import type { ReactNode } from "react";

import classes from "./TextAlternative.module.css";

/** The content of a picture as text or a table; collapsed at first. */
export function TextAlternative({ title, children }: { title: string; children: ReactNode }) {
  return (
    <details>
      <summary className={classes.title}>{title}</summary>
      {children}
    </details>
  );
}
