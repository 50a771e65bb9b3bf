"""Parses sizes in bytes and rates, as users write them; `share_compute.quantities` formats them."""

from __future__ import annotations

import re

from share_compute.errors import UserError
from share_compute.rate_limit import LEAST_BYTES_PER_S

_RATE = re.compile(r"([0-9.]+)\s*([kKMGT]?i?)(bit(?:/s)?|bps|B(?:/s|ps)?)")
_LEAST_PLAIN_BYTES = 2**20
"""Smallest size that may be given without a unit; smaller numbers are meant in another unit."""
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


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
    if size and not unit and size < _LEAST_PLAIN_BYTES:
        raise UserError(
            f"{text!r} is not a size of memory: it has no unit", hint=f"did you mean {number.strip()}GiB?"
        )
    if not 1 <= size < 2**63:
        raise UserError(f"{text!r} is not a size of memory", hint="write it like 4GiB or 500MB")
    return int(size)


def parse_rate(text: str) -> int:
    """Return the bytes per second of a rate such as ``10Mbit``, ``10 Mbit/s``, ``10Mbps`` or ``1.25MB/s``.

    A rate without a unit, or in ``b`` or ``Mb``, is refused, because it might mean bits or bytes.

    Raises:
        UserError: the text is not a rate, or the rate is too low.
    """
    match = _RATE.fullmatch(text.strip())
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or not 0 < number < 1e15:
        raise UserError(
            f"{text!r} is not a rate", hint="write it like 10Mbit (bits) or 2MB (bytes per second)"
        )
    prefix, unit = match[2].lower(), match[3]
    base = 1024 if prefix.endswith("i") else 1000
    bytes_per_s = number * base ** _POWERS[prefix.removesuffix("i")] / (1 if unit.startswith("B") else 8)
    if not LEAST_BYTES_PER_S <= bytes_per_s < 2**63:
        raise UserError(
            f"the rate {text} is out of range", hint=f"give at least {LEAST_BYTES_PER_S * 8 // 1000}kbit"
        )
    return int(bytes_per_s)
