"""Types that bodies of the REST API and options of the command line share. Imports nothing heavy."""

from __future__ import annotations

from typing import Literal, TypeAlias

UploadKind: TypeAlias = Literal["data", "model", "tokenizer"]
"""Kind of an upload."""
