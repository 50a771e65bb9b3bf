"""States and events of jobs and deployments."""
