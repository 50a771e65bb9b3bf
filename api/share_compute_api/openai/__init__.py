"""The OpenAI-compatible API for served models: requests, engines that answer them, and answers."""
