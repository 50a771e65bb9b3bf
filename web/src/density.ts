/** Density of rows and cards: a choice for all pages, which the browser stores. */
import { kept, Shared } from "./kept";

export type Density = "comfortable" | "compact";

const NAME = "share-compute.density";
const chosen = new Shared<Density>([NAME], () => (kept(NAME) === "compact" ? "compact" : "comfortable"));

export function useDensity(): Density {
  return chosen.use();
}

/** Choose, and keep the choice. */
export function chooseDensity(density: Density): void {
  chosen.keep(NAME, density);
}

/** Apply the choice to the stylesheet, including changes in another tab. */
export function followDensity(): void {
  const show = () => document.documentElement.setAttribute("data-density", chosen.get());
  chosen.subscribe(show);
  show();
}
