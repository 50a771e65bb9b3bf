import { useQueryClient, type InfiniteData } from "@tanstack/react-query";

import { api, body } from "../../api/client";
import { job as jobQuery } from "../../api/queries";
import type { Job, JobPage } from "../../api/types";

/** Returns a function that changes labels of a job, on the server and in the loaded lists. */
export function useRelabel(): (id: string, labels: { tags?: string[]; note?: string }) => Promise<void> {
  const client = useQueryClient();
  return async (id, labels) => {
    const changed: Job = await body(api.PATCH("/api/v1/jobs/{job_id}", { params: { path: { job_id: id } }, body: labels }));
    client.setQueryData(jobQuery(id).queryKey, changed);
    client.setQueriesData<InfiniteData<JobPage>>({ queryKey: ["jobs"] }, (old) =>
      old && { ...old, pages: old.pages.map((page) => ({ ...page, jobs: page.jobs.map((job) => (job.id === id ? changed : job)) })) },
    );
  };
}

/** The tags in a text, separated by commas. */
export function tagsIn(text: string): string[] {
  return [...new Set(text.split(/[,，]/).map((tag) => tag.trim()))].filter((tag) => tag !== "");
}
