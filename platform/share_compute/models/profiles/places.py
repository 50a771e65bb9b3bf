"""Naming scheme of a model's parameters: a parameter's stored name determines its layer."""

from __future__ import annotations

from share_compute.files.strict import StrictModel

BEFORE = -1
"""Layer index that stands for the modules before the first layer."""
_MOST_DIGITS = 10


class Places(StrictModel):
    """Naming scheme of a model's parameters: a parameter's stored name determines its layer."""

    stack: str
    """Prefix of the names of all parameters in layers, up to the layer's number, e.g. ``model.layers.``."""
    num_layers: int
    opening: tuple[str, ...] = ()
    """Name prefixes of the modules before the first layer."""
    closing: tuple[str, ...] = ()
    """Name prefixes of the modules after the last layer."""
    tied: tuple[str, ...] = ()
    """Stored names of parameters before the first layer that modules after the last layer use too."""

    def of(self, name: str) -> int:
        """Return a parameter's layer index: `BEFORE` before the first layer, ``num_layers`` after the last one."""
        if name.startswith(self.stack):
            number = name[len(self.stack) :].partition(".")[0]
            if number.isdecimal():
                return int(number)
        return BEFORE if name.startswith(self.opening) else self.num_layers

    def layer_of(self, name: str) -> int | None:
        """Return the result of `of`; None for a name that belongs to no layer and to no module before or after them."""
        number = name.removeprefix(self.stack).partition(".")[0] if name.startswith(self.stack) else ""
        if number.isdecimal() and len(number) < _MOST_DIGITS and int(number) < self.num_layers:
            return int(number)
        if name.startswith(self.opening):
            return BEFORE
        return self.num_layers if name.startswith(self.closing) else None
