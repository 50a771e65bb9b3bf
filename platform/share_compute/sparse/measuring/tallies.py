"""Sums over measured rows that do not depend on the order: metrics do not depend on the division of rows among workers.

A sum of floating-point numbers depends on the order of the additions. So numbers are added as integers, in units of
2^-1127, which represents each finite float64 exactly. Scores are counted by their value, from which AUROC follows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from share_compute.errors import VerificationFailed
from share_compute.sparse.blocks import Block, Floats, RawRows
from share_compute.sparse.keys import places_of, uniform
from share_compute.sparse.models import MatrixFactorization, SparseModel, Totals
from share_compute.sparse.topics import TopicModel

_UNIT_BITS = 1127
_HALF_BITS = 26
_MOST_SCORES = 1 << 24
"""Maximum number of distinct scores; AUROC is not computed if there are more."""
_VALUE_FACTOR = np.uint64(0x9FB21C651E98DF25)
_TARGET_FACTOR = np.uint64(0xD6E8FEB86659FD93)
Counts = NDArray[np.int64]


def exact_sum(values: NDArray[np.float64]) -> int:
    """Return the sum of finite numbers in units of 2^-1127, without rounding."""
    fractions, exponents = np.frexp(values)
    numbers = (fractions * (1 << 53)).astype(np.int64)
    highs, lows = numbers >> _HALF_BITS, numbers & ((1 << _HALF_BITS) - 1)
    total = 0
    for exponent in np.unique(exponents).tolist():
        chosen = exponents == exponent
        part = (int(highs[chosen].sum()) << _HALF_BITS) + int(lows[chosen].sum())
        total += part << (exponent - 53 + _UNIT_BITS)
    return total


def mean_of(total: int, count: int) -> float:
    """Return an exact sum divided by a count, rounded once."""
    try:
        return total / (count << _UNIT_BITS)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class Tally:
    """Exact sums over measured rows."""

    rows: int
    is_finite: bool
    """Whether all losses are finite; if not, the sums are not used."""
    loss: int
    """Sum of the losses."""
    words: int = 0
    """Sum of the counts of all words, for topics."""
    squares: int = 0
    """Sum of the squared errors, for ratings."""
    absolutes: int = 0
    """Sum of the absolute errors, for ratings."""
    correct: int = 0
    """Rows with the right class."""
    scores: Floats | None = None
    """Distinct scores in their order, for classes; None if they are too many."""
    positives: Counts | None = None
    """Rows of the positive class by score."""
    negatives: Counts | None = None


def tally_of(model: SparseModel, block: Block, weights: Floats, totals: Totals) -> Tally:
    """Return the sums over a block.

    Args:
        model: the model.
        block: the rows.
        weights: weights of the touched places.
        totals: sum of the weights of all rows, and their number, for topics.
    """
    if isinstance(model, TopicModel):
        bounds = replace(model, tolerance=0.0).bounds(block, weights, totals)
        words = exact_sum(block.matrix.data.astype(np.float64))
        return replace(_checked(-bounds), words=words)
    scores = model.scores(block, weights)
    wide, targets = scores.astype(np.float64), block.targets.astype(np.float64)
    if not np.isfinite(wide).all():
        return Tally(len(wide), is_finite=False, loss=0)
    if isinstance(model, MatrixFactorization):
        errors = wide - targets
        squares = errors * errors
        absolutes = exact_sum(np.abs(errors))
        return replace(_checked(0.5 * squares), squares=exact_sum(squares), absolutes=absolutes)
    is_positive = targets > 0
    distinct, at = np.unique(scores + np.float32(0), return_inverse=True)  # there is no -0.0 then
    counted = [np.bincount(at[chosen], minlength=len(distinct)) for chosen in (is_positive, ~is_positive)]
    tally = _checked(np.logaddexp(0, wide) - targets * wide)
    correct = int(np.count_nonzero((wide > 0) == is_positive))
    return replace(tally, correct=correct, scores=distinct, positives=counted[0], negatives=counted[1])


def _checked(losses: NDArray[np.float64]) -> Tally:
    if not np.isfinite(losses).all():
        return Tally(len(losses), is_finite=False, loss=0)
    return Tally(len(losses), is_finite=True, loss=exact_sum(losses))


def merged(tallies: Iterable[Tally]) -> Tally:
    """Return the sums over all rows of several tallies; their order does not matter."""
    parts = [part for part in tallies if part.rows]  # some workers may have no rows to measure
    total = Tally(
        rows=sum(part.rows for part in parts),
        is_finite=all(part.is_finite for part in parts),
        loss=sum(part.loss for part in parts),
        words=sum(part.words for part in parts),
        squares=sum(part.squares for part in parts),
        absolutes=sum(part.absolutes for part in parts),
        correct=sum(part.correct for part in parts),
    )
    scored = [
        (part.scores, part.positives, part.negatives)
        for part in parts
        if part.scores is not None and part.positives is not None and part.negatives is not None
    ]
    if not scored or len(scored) != len(parts):
        return total
    distinct, at = np.unique(np.concatenate([each[0] for each in scored]), return_inverse=True)
    if len(distinct) > _MOST_SCORES:
        return total
    positives, negatives = np.zeros(len(distinct), np.int64), np.zeros(len(distinct), np.int64)
    np.add.at(positives, at, np.concatenate([each[1] for each in scored]))
    np.add.at(negatives, at, np.concatenate([each[2] for each in scored]))
    return replace(total, scores=distinct, positives=positives, negatives=negatives)


def area_of(tally: Tally) -> float | None:
    """Return the area under the ROC curve; None if all rows are of one class, or there are too many scores."""
    if tally.positives is None or tally.negatives is None:
        return None
    pairs = int(tally.positives.sum()) * int(tally.negatives.sum())
    below = np.cumsum(tally.negatives) - tally.negatives
    # Twice the number of pairs in which the positive row has the larger score; ties count half.
    won = sum(map(int.__mul__, tally.positives.tolist(), (2 * below + tally.negatives).tolist()))
    return won / (2 * pairs) if pairs else None


def tally_bytes(tally: Tally) -> bytes:
    """Return a tally as bytes."""
    facts = {
        name: getattr(tally, name)
        for name in ("rows", "is_finite", "loss", "words", "squares", "absolutes", "correct")
    }
    arrays: dict[str, NDArray[np.generic]] = {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}
    if tally.scores is not None and tally.positives is not None and tally.negatives is not None:
        arrays |= {"scores": tally.scores, "positives": tally.positives, "negatives": tally.negatives}
    return bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def tally_from(content: bytes) -> Tally:
    """Return the tally that these bytes encode.

    Raises:
        VerificationFailed: the bytes are damaged.
    """
    try:
        arrays = load(content)
        facts = json.loads(arrays["facts"].tobytes())
        counts = [arrays.get(name) for name in ("scores", "positives", "negatives")]
        return Tally(**facts, scores=counts[0], positives=counts[1], negatives=counts[2])
    except (SafetensorError, KeyError, ValueError, TypeError) as failure:
        raise VerificationFailed(f"a worker's measurements cannot be read: {failure}") from failure


def held_out(rows: RawRows, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return which rows are held out for measurements, ``[rows]``.

    The choice depends only on the content of a row and the seed, and not on the worker that reads the row. Equal rows
    are all held out, or all kept.

    Args:
        rows: the rows.
        fraction: approximate fraction of the rows that is held out.
        seed: seed of the draw.
    """
    if not fraction:
        return np.zeros(len(rows), np.bool_)
    places = places_of(rows.keys)
    if rows.is_second is not None:
        places[rows.is_second] = places_of(rows.keys[rows.is_second], is_second=True)
    values = rows.values.astype(np.float32).view(np.uint32).astype(np.uint64)
    targets = rows.targets.astype(np.float32).view(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        entries = (places ^ (places >> np.uint64(29))) * (values * _VALUE_FACTOR | np.uint64(1))
        ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(entries, dtype=np.uint64)])
        sums = ends[rows.starts[1:]] - ends[rows.starts[:-1]] + targets * _TARGET_FACTOR
    chosen: NDArray[np.bool_] = uniform(sums, seed, 1)[:, 0] < fraction
    return chosen
