import { useQuery } from "@tanstack/react-query";
import { useEffect, useMemo } from "react";

import { alerts as alertsQuery } from "../api/queries";
import type { Alert } from "../api/types";
import { forgetEnded, isAcknowledged, useAcknowledged } from "./acknowledged";

export interface KnownAlerts {
  fresh: Alert[];
  acknowledged: Alert[];
}

/** Return the current alerts: `fresh` ones, and those that the user has `acknowledged`. */
export function useAlerts(isEnabled: boolean): KnownAlerts {
  const { data } = useQuery({ ...alertsQuery, enabled: isEnabled });
  const known = useAcknowledged();
  useEffect(() => {
    if (data !== undefined) forgetEnded(data);
  }, [data]);
  return useMemo(() => split(data ?? [], known), [data, known]);
}

function split(all: readonly Alert[], known: Parameters<typeof isAcknowledged>[0]): KnownAlerts {
  return {
    fresh: all.filter((alert) => !isAcknowledged(known, alert)),
    acknowledged: all.filter((alert) => isAcknowledged(known, alert)),
  };
}
