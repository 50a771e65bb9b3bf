"""Choices that job files and options of the command line share.

The command line imports this module instead of `share_compute.specification`, which would double its start time.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Objective: TypeAlias = Literal["latency", "throughput"]
"""Objective of serving: the shortest time of one request, or the most tokens per second within the limits."""
ServedPrecision: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]
"""Data type of the weights of a served model."""
Compiling: TypeAlias = Literal["auto", "on", "off"]
"""Whether layers compute with compiled code; auto does so if it is faster."""
