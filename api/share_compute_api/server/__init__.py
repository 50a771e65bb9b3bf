"""State and services of the control plane that routes use: authorization, sessions, event streams, alerts, limits."""
