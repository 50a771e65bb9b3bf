"""Which members of a stage are wrong, from digests of their gradients."""

from __future__ import annotations

import pytest

from share_compute.protocol.agreement import Agreement, compare


@pytest.mark.parametrize(
    ("digests", "before", "deviating", "disputed"),
    [
        ("xx", "", "", ""),
        ("xxy", "", "c", ""),
        ("xyy", "", "a", ""),
        ("xxxyz", "", "de", ""),
        ("xy", "", "", "ab"),
        ("xyz", "", "", "abc"),
        ("xxyy", "", "", "abcd"),
        ("xx", "xy", "b", ""),
        ("xx", "yx", "a", ""),
        ("xx", "yz", "", ""),
        ("xz", "xy", "b", ""),
        ("xy", "xy", "", "ab"),
        ("xy", "yx", "", "ab"),
        ("xxy", "xxz", "c", ""),
        ("xxxx", "xxyy", "cd", ""),
        # the third came after the first answers
        ("xyy", "xy", "a", ""),
        ("xxz", "xy", "bc", ""),
        ("vzv", "xy", "", "abc"),
        ("zyz", "xy", "a", ""),
        # the first or the second is gone
        ("x-", "xy", "", "ab"),
        ("-y", "xy", "", "ab"),
        ("-x", "xy", "", ""),
        ("-yy", "xy", "", "abc"),
        ("-yx", "xy", "", "abc"),
        ("-xx", "xy", "b", ""),
    ],
)
def test_members_are_outvoted_or_contradict_themselves(
    digests: str, before: str, deviating: str, disputed: str
) -> None:
    now = {worker: digest for worker, digest in zip("abcde", digests, strict=False) if digest != "-"}
    first = dict(zip("abcde", before, strict=False))
    assert compare(now, first) == Agreement(frozenset(deviating), frozenset(disputed))
