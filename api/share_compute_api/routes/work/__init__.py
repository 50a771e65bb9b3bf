"""Routes of jobs, deployments, batches, uploads and the OpenAI API."""
