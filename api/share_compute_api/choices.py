"""Values that bodies of the REST API and options of the command line share. Imports nothing heavy."""

from __future__ import annotations

from typing import Literal, TypeAlias

LentDevice: TypeAlias = Literal["auto", "cpu", "cuda"]
"""What of a machine computes for others; auto: its GPUs where it has some."""
UploadKind: TypeAlias = Literal["data", "model", "tokenizer"]
"""What an upload is."""
