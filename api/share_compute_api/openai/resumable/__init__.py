"""Streams that a client can continue after its connection broke or the server was restarted."""
