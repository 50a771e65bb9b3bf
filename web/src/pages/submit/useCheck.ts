/** Validates a job on the server while the user types; a new request aborts the previous one. */
import { useDebouncedValue } from "@mantine/hooks";
import { keepPreviousData, useQuery } from "@tanstack/react-query";

import type { FieldProblem } from "../../api/problem";
import { check } from "../../api/submit";

const TYPING_MS = 400;

export interface Check {
  problems: readonly FieldProblem[];
  /** Whether the result belongs to the current text, and the server would accept the text. */
  isGood: boolean;
  hint: string | undefined;
  error: Error | null;
}

export function useCheck(text: string, isReadable: boolean): Check {
  const [settled] = useDebouncedValue(text, TYPING_MS);
  const { data, error, isPlaceholderData } = useQuery({
    queryKey: ["check", settled],
    queryFn: ({ signal }) => check(settled, signal),
    enabled: isReadable && settled.trim() !== "",
    placeholderData: keepPreviousData,
    // Machines, uploads and deployments change.
    staleTime: 0,
    gcTime: 60_000,
  });
  const problems = data?.problems ?? [];
  return {
    problems,
    isGood: data !== undefined && !isPlaceholderData && settled === text && problems.length === 0,
    hint: data?.hint ?? undefined,
    error,
  };
}
