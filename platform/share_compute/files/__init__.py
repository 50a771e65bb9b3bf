"""Access to files: strict pydantic models, restricted YAML, the topology file, safe paths and durable writes."""
