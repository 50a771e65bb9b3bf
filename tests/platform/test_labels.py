"""Labels of machines: what owners may give, and the selectors that match them."""

from __future__ import annotations

import pytest

from share_compute.errors import UserError
from share_compute.labels import MOST_LABELS, label_texts, matches, parse_labels
from share_compute.topology import Contributor

ADA = Contributor("con-1", "ada", (), labels={"site": "paris", "note": "a=b, c"})


def test_labels_are_read_and_written() -> None:
    given = ["site=Île-de-France", "note=a=b, c", "gpu=no"]
    labels = parse_labels(given)
    assert labels == {"site": "Île-de-France", "note": "a=b, c", "gpu": "no"}
    assert label_texts(labels) == ["gpu=no", "note=a=b, c", "site=Île-de-France"]
    assert parse_labels(label_texts(labels)) == labels
    assert parse_labels([]) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["site"], "'site' is no label"),
        (["=paris"], "'' is no key of a label"),
        (["Site=paris"], "'Site' is no key of a label"),
        (["1st=paris"], "begin with a-z"),
        ([f"{'k' * 33}=x"], "up to 32 characters"),
        (["site="], "the value of label site must have 1 to 64 printable characters"),
        ([f"site={'x' * 65}"], "the value of label site must have 1 to 64 printable characters"),
        (["site=a\nb"], "the value of label site must have 1 to 64 printable characters"),
        (["site=\x1b[31m"], "the value of label site must have 1 to 64 printable characters"),
        (["site=paris", "site=rome"], "label site is given twice"),
        (
            [f"k{number}=x" for number in range(MOST_LABELS + 1)],
            "17 labels are given, and a machine has at most 16",
        ),
    ],
)
def test_what_is_no_label_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_labels(given)
    assert message in caught.value.message
    assert caught.value.hint


def test_no_machine_is_selected_by_a_name_that_is_the_id_of_another_one() -> None:
    impostor = Contributor("con-zzzzzzzz", "con-abcdefgh", ())
    assert not matches("con-abcdefgh", impostor)
    assert matches("con-zzzzzzzz", impostor)


@pytest.mark.parametrize(
    ("selector", "is_match"),
    [
        ("ada", True),
        ("con-1", True),
        ("site=paris", True),
        ("note=a=b, c", True),
        ("site=rome", False),
        ("site", False),
        ("paris", False),
        ("gpu=no", False),
        ("Ada", False),
    ],
)
def test_a_selector_is_a_name_an_id_or_a_label(selector: str, *, is_match: bool) -> None:
    assert matches(selector, ADA) is is_match
