"""Names of the synthetic fleets, in a module without slow imports, so that the command line starts fast."""

from __future__ import annotations

from enum import StrEnum


class FleetName(StrEnum):
    """Kinds of synthetic fleets."""

    home = "home"
    campus = "campus"
    datacentre = "datacentre"
    mixed = "mixed"
