import { Group, Switch, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";

import { metrics } from "../../api/queries";
import type { Job } from "../../api/types";
import { CurveChart } from "../../components/CurveChart";
import { Failure, Loading } from "../../components/Feedback";
import { loss } from "../../format";
import { lossCurves } from "./curves";

export function Curves({ job }: { job: Job }) {
  const { data, error, refetch } = useQuery(metrics(job.id));
  const [isLog, setIsLog] = useState(false);
  const drawn = useMemo(() => lossCurves(data ?? []), [data]);
  if (data === undefined) return error === null ? <Loading lines={6} /> : <Failure error={error} retry={() => void refetch()} />;
  if (drawn.steps.length === 0) return <Text size="sm" c="dimmed">The curve begins with the first step.</Text>;
  return (
    <div>
      <Group justify="space-between" mb="xs">
        <Text size="sm" c="dimmed">
          {drawn.summary} Drag to zoom, double-click to see all.
        </Text>
        <Switch label="Log scale" checked={isLog} onChange={(event) => setIsLog(event.currentTarget.checked)} />
      </Group>
      <CurveChart
        steps={drawn.steps}
        curves={drawn.curves}
        isLog={isLog}
        description={`Loss over steps. ${drawn.summary}`}
        format={loss}
      />
    </div>
  );
}
