"""Files that survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file, or the list of a folder's files, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
