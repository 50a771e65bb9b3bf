/** The machines of the cluster now: a map of islands and links, or a table. */
import { Code, Group, SimpleGrid, Stack, Switch, Text, TextInput } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi, Link, useNavigate } from "@tanstack/react-router";
import { Suspense, useDeferredValue, useMemo, useRef } from "react";
import { useTranslation } from "react-i18next";

import { cluster as clusterQuery } from "../api/queries";
import { isGone, type ClusterView } from "../api/types";
import { Empty, Loading, Waiting } from "../components/Feedback";
import { Figure } from "../components/Figure";
import { ButtonLink } from "../components/links";
import { Page } from "../components/frame/Page";
import { bytes, count, si } from "../format";
import { lazyPart } from "../lazy";
import { found, groupsOf, reused, sumsOf, type MachineGroup } from "../cluster/groups";
import { MachineTable } from "../cluster/MachineTable";
import { ClusterMap } from "../cluster/ClusterMap";
import { clusterSearch, type ClusterSearch } from "../cluster/search";
import { usePlaces } from "../cluster/usePlaces";
import { FirstSteps } from "./firststeps/FirstSteps";
import classes from "./Cluster.module.css";

/** Loaded on demand, because it draws with uPlot, which the first page does not need. */
const Multiples = lazyPart(async () => (await import("../cluster/multiples/Multiples")).Multiples);
const route = getRouteApi("/");

export function Cluster() {
  const { t } = useTranslation();
  const { data, error, refetch } = useQuery(clusterQuery);
  return (
    <Page title={t("Machines")}>
      {data !== undefined ? (
        <FirstSteps machines={data.machines.length}>
          {data.machines.length === 0 ? <NobodyYet /> : <Machines cluster={data} />}
        </FirstSteps>
      ) : (
        <Waiting error={error} refetch={refetch} />
      )}
    </Page>
  );
}

function Machines({ cluster }: { cluster: ClusterView }) {
  const { t } = useTranslation();
  const search = route.useSearch();
  const navigate = useNavigate({ from: "/" });
  const showsGone = search.gone === true;
  const here = useMemo(() => cluster.machines.filter((machine) => !isGone(machine)), [cluster.machines]);
  const sums = sumsOf(here);
  const goneCount = cluster.machines.length - here.length;
  const last = useRef<readonly MachineGroup[]>([]);
  const everyone = useMemo(() => (last.current = reused(last.current, groupsOf(cluster, showsGone))), [cluster, showsGone]);
  const places = usePlaces(everyone);
  // An island keeps its number as long as it keeps its cell.
  const numbers = useMemo(
    () => new Map([...places.islands.cells].map(([id, cell]) => [id, cell + 1])),
    [places],
  );
  const islandOf = useMemo(
    () => new Map([...places.islands.homes].map(([id, cell]) => [id, cell + 1])),
    [places],
  );
  const wanted = useDeferredValue(search.q);
  const shown = useMemo(() => found(showsGone ? cluster.machines : here, wanted), [cluster.machines, here, showsGone, wanted]);
  const groups = useMemo(() => {
    if (wanted === undefined) return everyone;
    const kept = new Set(shown);
    return everyone
      .map((group) => ({ ...group, machines: group.machines.filter((machine) => kept.has(machine)) }))
      .filter((group) => group.machines.length > 0);
  }, [everyone, shown, wanted]);
  return (
    <>
      <SimpleGrid cols={{ base: 2, sm: 4 }} spacing="sm">
        <Figure label={t("Machines here")} value={count(sums.machines)} />
        <Figure label={t("At work")} value={count(sums.atWork)} share={ratio(sums.atWork, sums.machines)} />
        <Figure label={t("Measured speed")} value={si(sums.flopsPerS, "FLOP/s")} />
        <Figure
          label={t("Memory planned / lent")}
          value={`${bytes(sums.usedBytes)} / ${bytes(sums.lentBytes)}`}
          title={t("Memory that plans need, of all that owners lend")}
          share={ratio(sums.usedBytes, sums.lentBytes)}
        />
      </SimpleGrid>
      <Group gap="md">
        <Views search={search} />
        <TextInput
          className={classes.search}
          type="search"
          aria-label={t("Search machines")}
          placeholder={t("Name, owner, device, state, work")}
          value={search.q ?? ""}
          onChange={(event) => {
            const q = event.currentTarget.value;
            void navigate({ search: (old) => clusterSearch({ ...old, page: undefined, q }), replace: true });
          }}
        />
        {goneCount > 0 && (
          <Switch
            label={t("Show {{number}} that left", { number: count(goneCount) })}
            checked={showsGone}
            onChange={(event) => {
              const gone = event.currentTarget.checked;
              void navigate({ search: (old) => clusterSearch({ ...old, gone, page: undefined }), replace: true });
            }}
          />
        )}
      </Group>
      {here.length === 0 && !showsGone ? (
        <Empty title={t("No machine is here now")}>
          <Text>{t("All machines that joined have left. A new invite brings in another.")}</Text>
        </Empty>
      ) : search.view === "table" || shown.length === 0 ? (
        <MachineTable machines={shown} islands={islandOf} search={search} />
      ) : search.view === "use" ? (
        <Suspense fallback={<Loading />}>
          <Multiples machines={shown} />
        </Suspense>
      ) : (
        <ClusterMap cluster={cluster} groups={groups} places={places} numbers={numbers} open={search.island} />
      )}
    </>
  );
}

function ratio(part: number, whole: number): number {
  return whole > 0 ? part / whole : 0;
}

/** Switches between map, table and charts; the choice is in the URL. */
function Views({ search }: { search: ClusterSearch }) {
  const { t } = useTranslation();
  return (
    <nav className={classes.views} aria-label={t("View")}>
      <Link to="/" search={(old) => clusterSearch({ ...old, view: undefined })} replace data-chosen={search.view === undefined} aria-current={search.view === undefined ? "true" : undefined}>
        {t("Map")}
      </Link>
      <Link to="/" search={(old) => clusterSearch({ ...old, view: "table" })} replace data-chosen={search.view === "table"} aria-current={search.view === "table" ? "true" : undefined}>
        {t("Table")}
      </Link>
      <Link to="/" search={(old) => clusterSearch({ ...old, view: "use" })} replace data-chosen={search.view === "use"} aria-current={search.view === "use" ? "true" : undefined}>
        {t("Utilization")}
      </Link>
    </nav>
  );
}

function NobodyYet() {
  const { t } = useTranslation();
  return (
    <Empty title={t("No machine has joined yet")}>
      <Text>
        {t("Create an invite and run its line on the machine that lends its power, or lend this one with")}{" "}
        <Code>share-compute up --contribute</Code>
      </Text>
      <Stack>
        <ButtonLink to="/invites">{t("Create an invite")}</ButtonLink>
      </Stack>
    </Empty>
  );
}
