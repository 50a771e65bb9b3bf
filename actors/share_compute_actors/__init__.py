"""All code that runs inside Ray: contributors, members, channels, collectives, coordinators and deployments."""
