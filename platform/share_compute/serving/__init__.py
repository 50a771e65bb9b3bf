"""Serving: what is asked for, the turns that travel through the pools, who is in them, and how tokens are drawn."""
