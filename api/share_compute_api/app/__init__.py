"""The FastAPI application, the process that serves it, and the dashboard's files."""
