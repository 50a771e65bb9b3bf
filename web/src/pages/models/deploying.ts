/** Deploys a model of the catalogue. */
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { useEffect, useRef } from "react";

import { deployment as deploymentQuery } from "../../api/queries";
import { deploy } from "../../api/submit";
import type { CatalogueEntry } from "../../api/types";
import { freeName, isUnderWay } from "./entries";

const FETCH_MS = 3000;
/** Ten minutes; a later request finds the files that the server has fetched by then. */
const MOST_TRIES = 200;

/** The deployment that the user requested last. */
export interface Deploying {
  /** The model of this deployment; undefined before the first request. */
  entry: CatalogueEntry | undefined;
  isPending: boolean;
  error: Error | null;
  /** The reason why the last try was refused. */
  failureReason: Error | null;
  start: (entry: CatalogueEntry) => void;
}

/**
 * Deploy a model and open its page. The server fetches a model of the Hub in the background, and accepts the request
 * once the model has arrived. Retries end when the page is left. @param taken Names of the deployments that are up.
 */
export function useDeploying(taken: readonly string[]): Deploying {
  const navigate = useNavigate();
  const client = useQueryClient();
  const isMounted = useRef(true);
  useEffect(() => {
    isMounted.current = true;
    return () => void (isMounted.current = false);
  }, []);
  const { variables: entry, mutate, isPending, error, failureReason } = useMutation({
    mutationFn: (wanted: CatalogueEntry) => deploy({ name: freeName(wanted.name, taken), model: wanted.model }),
    retry: (failures, failure) => isMounted.current && failures < MOST_TRIES && isUnderWay(failure),
    retryDelay: FETCH_MS,
    onSuccess: (made) => void client.setQueryData(deploymentQuery(made.name).queryKey, made),
  });
  // Callbacks of `mutate` are dropped when the page is left, unlike those of the mutation itself.
  const start = (wanted: CatalogueEntry) =>
    mutate(wanted, { onSuccess: ({ name }) => void navigate({ to: "/deployments/$name", params: { name } }) });
  return { entry, isPending, error, failureReason, start };
}
