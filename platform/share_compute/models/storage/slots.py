"""Names of the state that is stored beside a parameter, such as an optimizer's moments: ``<parameter>::<slot>``."""

from __future__ import annotations

_SEPARATOR = "::"


def slot_name(parameter: str, slot: str) -> str:
    """Return the name under which a slot of a parameter is stored."""
    return f"{parameter}{_SEPARATOR}{slot}"


def parameter_of(name: str) -> str:
    """Return the name of the parameter that a stored tensor belongs to; a parameter belongs to itself."""
    return name.partition(_SEPARATOR)[0]


def split_name(name: str) -> tuple[str, str]:
    """Return parameter and slot of a stored slot.

    Raises:
        ValueError: this is not the name of a slot.
    """
    parameter, slot = name.split(_SEPARATOR)
    return parameter, slot
