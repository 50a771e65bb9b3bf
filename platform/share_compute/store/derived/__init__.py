"""Jobs and deployments that start from other jobs: links of a job, and trials of a sweep."""
