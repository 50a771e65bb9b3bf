"""Prefix index: find sequences with the same first tokens.

Tokens are grouped in blocks. The key of a block is a hash of all tokens up to the end of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

BLOCK = 16
"""Number of tokens in a block. A shorter common prefix is not worth a copy."""


def add_keys(keys: list[int], tokens: Sequence[int]) -> None:
    """Append the keys of the full blocks of ``tokens`` that are not in ``keys`` yet."""
    while (len(keys) + 1) * BLOCK <= len(tokens):
        start = len(keys) * BLOCK
        # Hashes can collide, so callers must compare the tokens, too.
        keys.append(hash((keys[-1] if keys else 0, *tokens[start : start + BLOCK])))


class PrefixIndex:
    """Index of sequences by the keys of their blocks."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[int, None]] = {}

    def add(self, sequence: int, keys: Sequence[int]) -> None:
        """Record that a sequence has the blocks with these keys."""
        for key in keys:
            self._holders.setdefault(key, {})[sequence] = None

    def remove(self, sequence: int, keys: Sequence[int]) -> None:
        """Record that a sequence no longer has the blocks with these keys."""
        for key in keys:
            holders = self._holders[key]
            del holders[sequence]
            if not holders:
                del self._holders[key]

    def deepest(self, keys: Sequence[int], most: int) -> tuple[int, list[int]]:
        """Return the length in blocks of the longest known prefix of ``keys``, and sequences that have this prefix.

        The most recently added sequences come first.

        Return (0, []) if no sequence has the first block.

        Args:
            keys: keys of the blocks to look for, in order.
            most: maximum number of sequences to return.
        """
        blocks = 0
        while blocks < len(keys) and keys[blocks] in self._holders:
            blocks += 1
        if not blocks:
            return 0, []
        return blocks, list(islice(reversed(self._holders[keys[blocks - 1]]), most))


def common_tokens(one: Sequence[int], other: Sequence[int], known: int) -> int:
    """Return the number of tokens in the common prefix of two sequences, or 0 if it is less than ``known``."""
    if one[:known] != other[:known]:
        return 0
    length = known
    for left, right in zip(islice(one, known, None), islice(other, known, None), strict=False):
        if left != right:
            break
        length += 1
    return length
