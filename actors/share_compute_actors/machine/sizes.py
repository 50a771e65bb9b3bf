"""Parses sizes in bytes, as users write them; `share_compute.quantities.bytes_text` formats sizes."""

from __future__ import annotations

from share_compute.errors import UserError


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a size such as ``4GiB``, ``500 MB`` or ``1073741824``.

    Raises:
        UserError: the text is not a size.
    """
    units = {"": 1, "b": 1}
    units |= {name + "ib": 1024**power for power, name in enumerate("kmgt", start=1)}
    units |= {name + "b": 1000**power for power, name in enumerate("kmgt", start=1)}
    units |= {name: 1024**power for power, name in enumerate("kmgt", start=1)}
    lowered = text.strip().lower()
    number = lowered.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = lowered[len(number) :].strip()
    try:
        size = float(number) * units[unit]
    except (KeyError, ValueError):
        size = 0.0
    if not 1 <= size < 2**63:
        raise UserError(f"{text!r} is not a size of memory", hint="write it like 4GiB or 500MB")
    return int(size)
