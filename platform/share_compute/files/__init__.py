"""Files: strict models, YAML, the topology file, and durable writes."""
