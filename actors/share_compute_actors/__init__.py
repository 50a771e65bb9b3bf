"""All that runs inside Ray: contributors, members, channels, collective, coordinator."""
