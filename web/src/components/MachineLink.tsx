import type { AnchorProps } from "@mantine/core";

import { AnchorLink } from "./links";

/** The name of a machine as a link to its page. */
export function MachineLink({ id, name, ...look }: { id: string; name: string } & AnchorProps) {
  return (
    <AnchorLink to="/machines/$machineId" params={{ machineId: id }} preload={false} size="sm" {...look}>
      {name}
    </AnchorLink>
  );
}
