"""Tables of pandas from lists of answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from share_compute.errors import UserError

Record = TypeVar("Record", bound=BaseModel)


class RecordList(list[Record]):
    """List of records that pandas can show as a table."""

    def to_pandas(self) -> Any:
        """Return a pandas table with a row for each record; values of ``data`` have their own columns.

        Raises:
            UserError: pandas is not installed.
        """
        return frame_of(flat(record) for record in self)


def flat(record: BaseModel) -> dict[str, Any]:
    """Return the scalar fields of a record, and the values of its ``data``."""
    fields = record.model_dump()
    data = fields.pop("data", {})
    return {
        name: value
        for name, value in {**fields, **data}.items()
        if not isinstance(value, Mapping | list | tuple | BaseModel)
    }


def frame_of(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return a pandas table with these rows; missing values are NaN.

    Raises:
        UserError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as failure:
        raise UserError("pandas is not installed", hint="install it: pip install pandas") from failure
    return pd.DataFrame([*rows])
