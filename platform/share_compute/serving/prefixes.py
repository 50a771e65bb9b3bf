"""Which sequences begin with the same tokens: an index of blocks, each named by all tokens up to its end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

BLOCK = 16
"""Tokens of a block; fewer common tokens are not worth a copy."""


def add_keys(keys: list[int], tokens: Sequence[int]) -> None:
    """Add the keys of the whole blocks of ``tokens`` behind those that are there."""
    while (len(keys) + 1) * BLOCK <= len(tokens):
        start = len(keys) * BLOCK
        # Hashes of integers are the same in every process. Two equal ones are compared token by token before use.
        keys.append(hash((keys[-1] if keys else 0, *tokens[start : start + BLOCK])))


class PrefixIndex:
    """Finds sequences by the keys of their first tokens."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[int, None]] = {}

    def add(self, sequence: int, keys: Sequence[int]) -> None:
        """Say that a sequence has these blocks."""
        for key in keys:
            self._holders.setdefault(key, {})[sequence] = None

    def remove(self, sequence: int, keys: Sequence[int]) -> None:
        """Say that a sequence does not have these blocks any more."""
        for key in keys:
            holders = self._holders[key]
            del holders[sequence]
            if not holders:
                del self._holders[key]

    def deepest(self, keys: Sequence[int], most: int) -> tuple[int, list[int]]:
        """Return how many of the first blocks some sequence has, and who has all of these, the latest first.

        Args:
            keys: of the blocks, in order.
            most: sequences to return at most.
        """
        blocks = 0
        while blocks < len(keys) and keys[blocks] in self._holders:
            blocks += 1
        if not blocks:
            return 0, []
        return blocks, list(islice(reversed(self._holders[keys[blocks - 1]]), most))


def common_tokens(one: Sequence[int], other: Sequence[int], known: int) -> int:
    """Return the length of the common beginning of two, 0 where they differ in the first ``known`` tokens."""
    if one[:known] != other[:known]:
        return 0
    length = known
    for left, right in zip(islice(one, known, None), islice(other, known, None), strict=False):
        if left != right:
            break
        length += 1
    return length
