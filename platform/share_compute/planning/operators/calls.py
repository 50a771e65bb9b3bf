"""Calls of operations of torch with the shapes of their tensors, and their descriptions by axes."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from share_compute.planning.operators.graph import COLUMN, FEATURES, NO_AXIS, Axis, OperatorKind


class Dims(NamedTuple):
    """Shape of a tensor, with a name for each dimension."""

    shape: tuple[int, ...]
    names: tuple[str, ...]


@dataclass
class TracedCall:
    """Call of an operation, with the shapes of its tensors instead of the tensors."""

    operation: str
    """Name without overload: ``linear``."""
    args: Sequence[Any]
    """Positional arguments; tensors, also those in lists, are `Dims`."""
    options: Mapping[str, Any]
    shape: tuple[int, ...]
    """Shape of the output."""
    pointwise: bool = False
    """Whether torch declares that the operation computes each number alone."""

    @property
    def tensors(self) -> list[Dims]:
        """Return the shapes of all input tensors, in order."""
        flat = list[Dims]()
        for value in (*self.args, *self.options.values()):
            if isinstance(value, Dims):
                flat.append(value)
            elif isinstance(value, list | tuple):
                flat += [each for each in value if isinstance(each, Dims)]
        return flat

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        return self.args[place] if place < len(self.args) else self.options.get(name, default)


@dataclass
class Rule:
    """Description of a call: letters of each dimension, and the axes that they name."""

    kind: OperatorKind
    inputs: list[str] = field(default_factory=list)
    output: str = ""
    names: list[str] = field(default_factory=list)
    """Names of the output's dimensions."""
    axes: dict[str, Axis] = field(default_factory=dict)
    flops: int = 0

    @property
    def equation(self) -> str:
        """Return the letters as an equation."""
        return f"{','.join(self.inputs)}->{self.output}"

    def axis(
        self,
        name: str,
        size: int,
        *,
        parts: int | None = None,
        contracted: bool = False,
        has_factors: bool = False,
        refusal: str = "",
    ) -> str:
        """Add an axis, and return its letter; the dot for a dimension of size 1."""
        if size == 1:
            return NO_AXIS
        letter = string.ascii_letters[len(self.axes)]
        name = COLUMN if name == FEATURES else name
        taken = {axis.name for axis in self.axes.values() if not axis.refusal}
        if name in taken and not refusal:
            name = next(f"{name}{count}" for count in range(2, 99) if f"{name}{count}" not in taken)
        self.axes[letter] = Axis(
            name, size, size if parts is None else parts, contracted, has_factors, refusal
        )
        return letter

    def dims(self, dims: Dims, refused: Mapping[int, str] | None = None) -> list[str]:
        """Add an axis for each dimension, and return their letters; ``refused`` has reasons by dimension."""
        return [
            self.axis(name, size, refusal=(refused or {}).get(place, ""))
            for place, (size, name) in enumerate(zip(*dims, strict=True))
        ]
