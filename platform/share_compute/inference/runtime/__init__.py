"""What a member of a deployment computes: stages, KV slots, packed weights, sampling."""
