"""A Ray worker on a hostile machine: once ordered to, its actors answer and send forged data.

It replaces Ray's ``setup_worker.py`` and needs no weakness of share-compute: an owner can change all programs on
the lent machine. The file that HOSTILE_ORDERS names says what is sent, once the file exists.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

ORDERS = "HOSTILE_ORDERS"
MARK = "import os; open({path!r}, 'a').write(str(os.getpid()) + chr(10))"


class Bomb:
    """Writes the id of the process that unpickles it into a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (MARK.format(path=self._marker),)


def marker_of(orders: Path) -> Path:
    """Return the file that bombs write."""
    return orders.with_suffix(".marker")


def _step() -> None:
    """Make Ray serialize the ordered data in place of the given data."""
    from ray._private.serialization import SerializationContext
    from ray.exceptions import RayTaskError

    as_it_is = SerializationContext.serialize
    orders = Path(os.environ[ORDERS])

    def serialize(self: Any, value: Any) -> Any:
        what = orders.read_text() if orders.exists() else ""
        if what == "pickles":
            return as_it_is(self, Bomb(marker_of(orders)))
        if what == "pickles inside":
            return as_it_is(self, [b"+", {"worker": Bomb(marker_of(orders))}])
        if what == "errors":
            failure = RayTaskError("status", "no trace", ValueError("none"))
            failure.cause = Bomb(marker_of(orders))
            failure.args = (*failure.args[:2], failure.cause, *failure.args[3:])
            return self._serialize_to_msgpack(failure)
        if what == "noise":
            return as_it_is(self, b'+[{"worker": 1, "step": "none"}]')
        return as_it_is(self, value)

    SerializationContext.serialize = serialize


if __name__ == "__main__":
    sys.argv = [one for one in sys.argv[1:] if not one.startswith(("--serialized-runtime-env", "--language"))]
    _step()
    runpy.run_path(sys.argv[0], run_name="__main__")
