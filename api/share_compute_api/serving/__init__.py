"""Requests to served models: prompts in, text out, in the shapes of the OpenAI API; engines do the rest."""
