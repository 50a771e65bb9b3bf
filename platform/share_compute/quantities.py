"""Formats quantities for people: bytes, rates, durations, percentages, names and lists of names."""

from __future__ import annotations

from collections.abc import Sequence

_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_LONG = ((365.25 * 86400, "years", 2), (86400, "days", 2), (3600, "h", 2), (60, "min", 2))
"""Units of durations of two minutes or more: (seconds per unit, name, smallest number with which the unit is used)."""
_DECIMAL = ("", "k", "M", "G", "T", "P")


def bytes_text(size_bytes: float) -> str:
    """Return ``3.1 GiB`` for 3,330,000,000."""
    return _scaled(size_bytes, 1024, _BINARY)


def exact_bytes_text(size_bytes: float) -> str:
    """Return ``3.1 GiB (3330000000 bytes)`` for 3,330,000,000."""
    return f"{bytes_text(size_bytes)} ({round(size_bytes)} bytes)"


def rate_text(bytes_per_s: float) -> str:
    """Return ``3.0 MB/s`` for 3,000,000."""
    return _scaled(bytes_per_s, 1000, _DECIMAL) + "B/s"


def flops_text(flops_per_s: float) -> str:
    """Return ``52.0 GFLOP/s`` for 5.2e10."""
    return _scaled(flops_per_s, 1000, _DECIMAL) + "FLOP/s"


def count_text(number: float) -> str:
    """Return a number with a decimal prefix: 1.1 B for 1 100 000 000."""
    return _scaled(number, 1000, ("", "K", "M", "B", "T")).rstrip()


def seconds_text(seconds: float) -> str:
    """Return a duration in a unit that fits it, such as ``12.4 ms``, ``1.31 s`` or ``3.2 min``."""
    for unit_s, unit, least in _LONG:
        if seconds >= least * unit_s:
            return f"{seconds / unit_s:,.1f} {unit}"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.{1 if 0 < seconds < 1e-4 else 0}f} us"


def percent_text(share: float) -> str:
    """Return ``93%`` for 0.93; never 0% for a positive share, nor 100% for a share below 1."""
    if 0 < share < 0.01:
        return "under 1%"
    return f"{min(share, 0.99) if share < 1 else share:.0%}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return ``a, b and c``; if there are more than ``most`` names, ``a, b, c and 7 more``."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def clipped(text: str, most: int = 80) -> str:
    """Return a text of at most ``most`` characters; a longer one ends with ``...``."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    place = 0
    while abs(value) >= base and place < len(units) - 1:
        value /= base
        place += 1
    digits = 0 if place == 0 and units is _BINARY else 1 if value < 100 else 0
    return f"{value:.{digits}f} {units[place]}"
