"""Routes for jobs, deployments, batches, uploads and the OpenAI API."""
