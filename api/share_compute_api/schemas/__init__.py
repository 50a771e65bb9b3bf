"""Pydantic models of requests and answers of the REST API."""
