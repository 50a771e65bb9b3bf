"""Serving: requests, the engine steps that travel through the stages, their scheduling, and sampling."""
