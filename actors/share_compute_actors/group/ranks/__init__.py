"""Ranks: the processes of one machine that compute the layers of a member together."""
