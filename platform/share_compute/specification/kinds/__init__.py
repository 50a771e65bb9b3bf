"""Jobs that are made of other jobs, and parsers for jobs of all kinds."""
