"""Types that bodies of the REST API and options of the command line share.

The command line imports this module at start, so it must not import heavy packages.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

UploadKind: TypeAlias = Literal["data", "model", "tokenizer"]
"""Kind of an upload."""
LONGEST_INVITE_S: Final = 366 * 24 * 3600
"""Longest validity of an invite, in seconds."""
