"""Jobs that run other jobs, and parsers for jobs of all kinds."""
