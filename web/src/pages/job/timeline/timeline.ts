/** Geometry of the timeline of one step. */
import type { Plan, PlanTimeline, TimelineCell } from "../../../api/types";

/** One machine's part of a step. */
export interface Row {
  stage: number;
  member: number;
  name: string;
  cells: TimelineCell[];
  update: { start_s: number; stop_s: number } | undefined;
  forward_s: number;
  backward_s: number;
  /** Time in which the machine neither computes cells nor updates weights. */
  waiting_s: number;
}

/** A row for each machine that computes cells, in pipeline order. */
export function rowsOf(plan: Plan, timeline: PlanTimeline): Row[] {
  const step = timeline.step_s ?? 0;
  const updates = new Map(timeline.updates.map((update) => [`${update.stage} ${update.member}`, update]));
  return plan.stages.flatMap((stage, place) =>
    stage.members.flatMap((member, seat): Row[] => {
      const cells = timeline.cells.filter((cell) => cell.stage === place && cell.member === seat);
      if (cells.length === 0) return [];
      const update = updates.get(`${place} ${seat}`);
      const forward_s = time(cells, "F");
      const backward_s = time(cells, "B");
      const updated_s = update === undefined ? 0 : update.stop_s - update.start_s;
      const waiting_s = Math.max(0, step - forward_s - backward_s - updated_s);
      return [{ stage: place, member: seat, name: member.name, cells, update, forward_s, backward_s, waiting_s }];
    }),
  );
}

/** Fraction of the step in which machines wait, averaged over them. */
export function bubbleOf(rows: readonly Row[], step: number): number {
  if (rows.length === 0 || step <= 0) return 0;
  return rows.reduce((sum, row) => sum + row.waiting_s, 0) / (rows.length * step);
}

/** About five round times, from 0 to the end of the step. */
export function ticksOf(step: number): number[] {
  const rough = step / 5;
  const scale = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((one) => one * scale >= rough)! * scale;
  return Array.from({ length: Math.floor(step / unit) + 1 }, (_, index) => index * unit);
}

function time(cells: readonly TimelineCell[], kind: "F" | "B"): number {
  return cells.reduce((sum, cell) => (cell.kind === kind ? sum + cell.stop_s - cell.start_s : sum), 0);
}
