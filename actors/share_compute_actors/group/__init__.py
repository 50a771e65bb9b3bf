"""Shared by training and inference: the group of members that one actor leads, and what such members have in common."""
