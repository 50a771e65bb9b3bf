"""Operator sharding: how the devices of one machine divide the operators of a layer."""
