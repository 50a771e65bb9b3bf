/** A plugin in `vite.config.ts` makes this module; see `Starts`. */
declare module "virtual:starts" {
  const starts: Readonly<Record<string, string>>;
  export default starts;
}
