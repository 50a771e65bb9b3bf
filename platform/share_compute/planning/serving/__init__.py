"""Plans of deployments: search, cost and explanation."""
