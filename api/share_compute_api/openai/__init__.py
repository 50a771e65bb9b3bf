"""Requests to served models in the shapes of the OpenAI API: prompts in, text out. Engines compute the answers."""
