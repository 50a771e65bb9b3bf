import classes from "./Job.module.css";

/** Quiet figures in one line: a label, a value, and an explanation of the value. */
export function Facts({ of }: { of: readonly (readonly [label: string, value: string, title?: string])[] }) {
  return (
    <dl className={classes.facts}>
      {of.map(([label, value, title]) => (
        <div key={label} title={title}>
          <dt>{label}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}
