"""Cost profiles of models: FLOPs, parameters and bytes of each layer."""
