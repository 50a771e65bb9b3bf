"""Encodes and decodes pagination cursors. A cursor is the time and the id of a page's last row, as text."""

from __future__ import annotations

import base64
import binascii
from datetime import datetime

from share_compute.errors import UserError


def write_cursor(moment: datetime, row_id: str) -> str:
    """Return the cursor of the row with this time and id."""
    return base64.urlsafe_b64encode(f"{moment.isoformat()} {row_id}".encode()).decode()


def read_cursor(cursor: str) -> tuple[datetime, str]:
    """Return the time and the row id of a cursor.

    Raises:
        UserError: the text is not a cursor.
    """
    foreign = UserError("the cursor is invalid", hint="use next_cursor of the page before")
    try:
        moment, row_id = base64.urlsafe_b64decode(cursor).decode().split(" ")
        at = datetime.fromisoformat(moment)
    except (ValueError, binascii.Error) as failure:
        raise foreign from failure
    if at.tzinfo is None:
        raise foreign
    return at, row_id
