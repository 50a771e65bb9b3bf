"""State and services of the control plane that routes use: keys, sessions, streams, alerts, limits."""
