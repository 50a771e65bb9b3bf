"""Helpers for both ends of a connection: addresses, TLS, server-sent events, retry delays."""
