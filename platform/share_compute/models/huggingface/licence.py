"""Reads the licence of a model from its model card (README.md).

The field ``license`` of the front matter contains the licence: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import re
from pathlib import Path

from share_compute.errors import UserError
from share_compute.files.plain_files import open_unlinked
from share_compute.files.plain_yaml import read_yaml

CARD = "README.md"
"""Name of the model card in a model's folder."""
LICENCE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,79}$")
"""Pattern of a licence's identifier, such as ``apache-2.0``."""
_MOST_CARD_BYTES = 1 << 20


def licence_in(folder: Path) -> str | None:
    """Return the licence in the model card of a folder; None if there is no card with a valid licence.

    A card that is a link, or below a link, is not read.
    """
    try:
        with open_unlinked(folder / CARD) as file:
            text = file.read(_MOST_CARD_BYTES).decode(errors="replace")
        head, _, _ = text.removeprefix("---\n").partition("\n---")
        fields = read_yaml(head, "model card")
    except (OSError, UserError):
        return None
    found = fields.get("license") if isinstance(fields, dict) else None
    return found if isinstance(found, str) and LICENCE.match(found) else None
