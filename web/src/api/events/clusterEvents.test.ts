import { QueryClient } from "@tanstack/react-query";
import { afterEach, expect, test, vi } from "vitest";

vi.hoisted(() => vi.stubGlobal("location", { origin: "http://here" }));

import { cluster } from "../queries";
import type { ClusterEvent, ClusterView } from "../types";
import { merged, ClusterCacheUpdater } from "./clusterEvents";
import { Refresher } from "./refresher";

afterEach(() => vi.unstubAllGlobals());

test("what happens while the first answer is on its way is asked for after it", async () => {
  const requests: string[] = [];
  let answerFirst: () => void = () => undefined;
  const isAsked = new Promise<void>((resolve) => (answerFirst = resolve));
  vi.stubGlobal("fetch", async ({ url }: Request) => {
    requests.push(new URL(url).search);
    const isFirst = requests.length === 1;
    if (isFirst) await isAsked;
    const machine = { id: "ctr-1", state: isFirst ? "joining" : "ready" };
    return Response.json({ machines: [machine], islands: { is_current: true, groups: [] } });
  });
  const client = new QueryClient();
  const updater = new ClusterCacheUpdater(client, new Refresher(client));
  const first = client.fetchQuery(cluster);
  const event = { seq: 7, kind: "contributor", contributor_id: "ctr-1", data: { state: "ready", reason: "" }, at: "" };
  updater.apply([event as unknown as ClusterEvent]);
  await Promise.resolve();
  expect(requests).toEqual([""]);
  answerFirst();
  expect((await first).machines[0]!.state).toBe("joining");
  await vi.waitFor(() => expect(client.getQueryData(cluster.queryKey)!.machines[0]!.state).toBe("ready"));
  expect(requests).toEqual(["", "?machine=ctr-1"]);
});

test("a machine that joins anew takes the place of its lost row", () => {
  const view = (...machines: object[]) => ({ machines, islands: { is_current: true, groups: [] } }) as unknown as ClusterView;
  const lost = { id: "con-1", name: "ash", state: "lost" };
  const other = { id: "con-2", name: "birch", state: "lost" };
  const anew = { id: "con-3", name: "ash", state: "joining" };
  expect(merged(view(lost, other), view(anew)).machines).toEqual([other, anew]);
});
