"""Store a batch's answers in part files, each of which is written atomically.

Part ``n`` holds the answers to rows ``n * size`` to ``(n + 1) * size`` (exclusive), in their order. A part whose file
is missing or damaged is not done.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyarrow import parquet

from share_compute.batches.inputs import Survey
from share_compute.errors import Conflict, VerificationFailed
from share_compute.files.durable import sync

_MOST_ROWS = 256
_FEWEST_PARTS = 200
_MANIFEST = "batch.json"
_log = logging.getLogger(__name__)
Kind = Literal["generate", "embed"]
COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    "generate": ("output", "finish_reason", "usage", "error"),
    "embed": ("embedding", "usage", "error"),
}
"""Columns of the answers, by kind of batch."""


def answer_schema(kind: Kind) -> Any:
    """Return the Arrow schema of answers."""
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage = pa.struct([(name, pa.int64()) for name in counts])
    types = {
        "output": pa.string(),
        "finish_reason": pa.string(),
        "embedding": pa.list_(pa.float32()),
        "usage": usage,
        "error": pa.string(),
    }
    return pa.schema([(name, types[name]) for name in COLUMNS[kind]])


class Parts:
    """The finished parts of one batch.

    Args:
        folder: folder of the part files; created if missing.
        kind: kind of the batch.
        survey: row counts and hashes of the input files.
        model: facts that identify the model, as JSON values.

    Raises:
        Conflict: the folder was created for other input files or another model.
    """

    def __init__(self, folder: Path, kind: Kind, survey: Survey, model: Mapping[str, Any]) -> None:
        self._folder = folder
        self._schema = answer_schema(kind)
        self.total = survey.total
        folder.mkdir(parents=True, exist_ok=True)
        self.size = self._settle(survey, model)
        """Number of rows in a part; the last one may have fewer."""
        self.failed = 0
        """Number of answers with an error, in all finished parts."""
        self.rows_done = 0
        """Number of rows in all finished parts."""
        self.done: set[int] = set()
        """Numbers of the finished parts."""
        self._counting = threading.Lock()
        for left in folder.glob(".*.partial"):  # partial file of a killed attempt
            left.unlink(missing_ok=True)
        for number in range(-(-self.total // self.size)):
            self._find(number)

    def _settle(self, survey: Survey, model: Mapping[str, Any]) -> int:
        file = self._folder / _MANIFEST
        facts = {"rows": list(survey.rows), "digests": list(survey.digests), "model": dict(model)}
        try:
            known = json.loads(file.read_bytes())
        except FileNotFoundError:
            size = max(1, min(_MOST_ROWS, survey.total // _FEWEST_PARTS))
            _write(file, json.dumps({**facts, "size": size}).encode())
            return size
        size = int(known.pop("size"))
        if known["model"] != facts["model"]:
            raise Conflict(
                "another model is deployed than the one that the job began with",
                hint="deploy that one again under its name, or submit a new job",
            )
        if known != facts:
            raise Conflict(
                "the files changed since the job began, so answers would belong to other rows",
                hint="restore them, or submit a new job",
            )
        return size

    def _find(self, number: int) -> None:

        try:
            errors = parquet.read_table(self._file(number), columns=["error"]).column(0)
        except FileNotFoundError:
            return
        except (OSError, pa.ArrowException) as failure:
            _log.warning(
                "%s is damaged; its rows are sent to the model again: %s", self._file(number), failure
            )
            return
        self._count(number, len(errors) - errors.null_count)

    def _count(self, number: int, failed: int) -> None:
        with self._counting:
            self.done.add(number)
            self.rows_done += self.rows_in(number)
            self.failed += failed

    def _file(self, number: int) -> Path:
        return self._folder / f"part-{number:08}.parquet"

    def rows_in(self, number: int) -> int:
        """Return the number of rows in a part."""
        return min(self.size, self.total - number * self.size)

    def keep(self, number: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Write a part durably, and record it as done. Thread-safe.

        Args:
            number: number of the part.
            answers: answer to each row of the part, by column; a missing column becomes null.
        """
        assert len(answers) == self.rows_in(number)
        buffer = pa.BufferOutputStream()
        parquet.write_table(pa.Table.from_pylist(list(answers), schema=self._schema), buffer)
        _write(self._file(number), buffer.getvalue())
        self._count(number, sum(answer.get("error") is not None for answer in answers))

    def tables(self) -> Iterator[Any]:
        """Yield the answers to all rows in order, as Arrow tables.

        Raises:
            VerificationFailed: a part is missing or incomplete.
        """
        for number in range(-(-self.total // self.size)):
            table = parquet.read_table(self._file(number)) if number in self.done else None
            if table is None or table.num_rows != self.rows_in(number):
                raise VerificationFailed(
                    f"part {number} of the answers is not whole",
                    hint=f"remove {self._file(number)}, and resume",
                )
            yield table


def _write(file: Path, content: Any) -> None:
    with whole(file) as partial:
        partial.write_bytes(content)


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yield a temporary path; if the block succeeds, rename it to ``file`` atomically and durably.

    The temporary path is unique, because an earlier attempt may still be writing.
    """
    partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        sync(partial)
        partial.replace(file)
        sync(file.parent)
    finally:
        partial.unlink(missing_ok=True)
