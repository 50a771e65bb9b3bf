/** All jobs as a table of experiments, newest first; the URL contains the view. */
import "@mantine/core/styles/Checkbox.css";

import { Button, Group, Text } from "@mantine/core";
import { keepPreviousData, useInfiniteQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useCallback, useMemo, useState } from "react";
import { useTranslation } from "react-i18next";

import { jobs } from "../api/queries";
import { Empty, Waiting } from "../components/Feedback";
import { Page } from "../components/frame/Page";
import { ButtonLink } from "../components/links";
import { columnsIn, MOST_COMPARED, sortIn, type RunsSearch } from "./runs/search";
import { defaultColumns, runsOf, type ColumnKey } from "./runs/columns";
import classes from "./runs/Runs.module.css";
import { RunsTable } from "./runs/RunsTable";
import { Toolbar } from "./runs/Toolbar";

const route = getRouteApi("/jobs");

export function Jobs() {
  const { t } = useTranslation();
  const search = route.useSearch();
  const navigate = route.useNavigate();
  const change = useCallback(
    (next: Partial<RunsSearch>) => void navigate({ search: (old) => ({ ...old, ...next }), replace: true, resetScroll: false }),
    [navigate],
  );
  const query = useInfiniteQuery({ ...jobs(search), placeholderData: keepPreviousData });
  const runs = useMemo(() => runsOf(query.data?.pages ?? []), [query.data]);
  const columns = useMemo(() => (search.columns === undefined ? defaultColumns(runs) : columnsIn(search.columns)), [search.columns, runs]);
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set());
  const choose = useCallback(
    (ids: readonly string[], isChosen: boolean) => setChosen((old) => new Set(isChosen ? [...old, ...ids] : [...old].filter((id) => !ids.includes(id)))),
    [],
  );
  const isFiltered = (["state", "kind", "name", "tag", "trials"] as const).some((name) => search[name] !== undefined);
  const isSorted = search.sort !== undefined || search.by !== undefined;
  return (
    <Page title={t("Jobs")}>
      <Toolbar search={search} runs={runs} columns={columns} change={change} />
      {query.data === undefined ? (
        <Waiting error={query.error} refetch={query.refetch} />
      ) : runs.length === 0 ? (
        <Empty title={isFiltered ? t("No job matches.") : t("No job yet")}>
          <Text>{isFiltered ? t("There may be jobs of other states, kinds or names.") : t("A job trains a model on the machines that joined.")}</Text>
          {!isFiltered && (
            <Group>
              <ButtonLink to="/submit">{t("Submit a job")}</ButtonLink>
            </Group>
          )}
        </Empty>
      ) : (
        <RunsTable
          runs={runs}
          columns={columns}
          sort={sortIn(search.sort)}
          by={search.by as ColumnKey | undefined}
          chosen={chosen}
          onChoose={choose}
          onSort={(sort) => change({ sort })}
        />
      )}
      {query.hasNextPage && (
        <div className={classes.row}>
          <Button variant="default" loading={query.isFetchingNextPage} onClick={() => void query.fetchNextPage()}>
            {t("Show older jobs")}
          </Button>
          {isSorted && (
            <Text size="sm" c="dimmed">
              {t("Only the {{number}} newest jobs are sorted and grouped.", { number: runs.length })}
            </Text>
          )}
        </div>
      )}
      {chosen.size > 0 && <Selection ids={[...chosen]} onClear={() => setChosen(new Set())} />}
    </Page>
  );
}

/** Number of the chosen jobs, and a link to their comparison. */
function Selection({ ids, onClear }: { ids: readonly string[]; onClear: () => void }) {
  const { t } = useTranslation();
  const isTooMany = ids.length > MOST_COMPARED;
  return (
    <div className={`card ${classes.selection}`} role="group" aria-label={t("Chosen jobs")}>
      <Text size="sm" role="status">
        {isTooMany ? t("Jobs chosen: {{number}}; at most {{most}} can be compared", { number: ids.length, most: MOST_COMPARED }) : t("Jobs chosen: {{number}}", { number: ids.length })}
      </Text>
      <Button size="xs" variant="default" onClick={onClear}>
        {t("Choose none")}
      </Button>
      {!isTooMany && (
        <ButtonLink to="/compare" search={{ jobs: ids.join(",") }} size="xs">
          {t("Compare")}
        </ButtonLink>
      )}
    </div>
  );
}
