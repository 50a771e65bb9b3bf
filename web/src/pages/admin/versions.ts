import type { Versions } from "../../api/types";

/** Official names of the components. */
const NAMES: Record<keyof Versions, string> = {
  share_compute: "share-compute",
  ray: "Ray",
  torch: "torch",
  python: "Python",
};

export const PARTS = Object.entries(NAMES) as [keyof Versions, string][];

export interface Difference {
  name: string;
  /** Undefined if the machine did not report its version. */
  given: string | undefined;
  wanted: string;
}

/** Components whose version differs from the server's; builds of one version (`2.13.0+cpu`) are equal. */
export function differences(given: Partial<Record<string, string>>, server: Versions): Difference[] {
  return PARTS.filter(([part]) => plain(given[part]) !== plain(server[part])).map(([part, name]) => ({
    name,
    given: given[part],
    wanted: server[part],
  }));
}

function plain(version: string | undefined): string | undefined {
  return version?.split("+")[0];
}
