"""Compiled code of layers: when it is used, and the folder with artifacts of earlier runs."""
