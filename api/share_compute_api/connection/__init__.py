"""What both ends of a connection use: addresses, TLS, server-sent events, pauses between tries."""
