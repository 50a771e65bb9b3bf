import classes from "./CopyBlock.module.css";
import { CopyButton } from "./CopyButton";

/** Several lines with a button that copies them. */
export function CopyBlock({ text, label }: { text: string; label: string }) {
  return (
    <div className={classes.block}>
      <pre className={classes.text} aria-label={label} tabIndex={0} role="group">
        <code>{text}</code>
      </pre>
      <CopyButton text={text} size="compact-sm" className={classes.button} />
    </div>
  );
}
