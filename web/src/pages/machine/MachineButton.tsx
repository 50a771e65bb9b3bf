/** A button with which an operator changes a machine, after a confirmation. */
import { useQueryClient } from "@tanstack/react-query";
import type { ReactNode } from "react";

import { fetchAgain } from "../../api/fetchAgain";
import { contributors, machine as machineQuery } from "../../api/queries";
import { useMay } from "../../api/scopes";
import { ConfirmButton } from "../../components/ConfirmButton";

interface Props {
  /** Id of the machine. */
  id: string;
  action: string;
  /** See `ConfirmButton`. */
  label?: string;
  question: string;
  /** Explains the consequences. */
  children: ReactNode;
  /** Makes the change; the machine is fetched again afterwards. */
  change: () => Promise<unknown>;
}

export function MachineButton({ id, change, ...rest }: Props) {
  const client = useQueryClient();
  const isAdmin = useMay("admin");
  if (!isAdmin) return null;
  const onConfirm = async () => {
    await change();
    await Promise.all([
      fetchAgain(client, { queryKey: contributors.queryKey }),
      fetchAgain(client, { queryKey: machineQuery(id).queryKey, exact: true }),
    ]);
  };
  return <ConfirmButton {...rest} onConfirm={onConfirm} />;
}
