"""The translator finds the template of a text; `translator.test.ts` runs the same cases for the dashboard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from share_compute.translations.translator import Translator, chinese

_SHARED = json.loads((Path(__file__).parent / "cases.json").read_text(encoding="utf-8"))
TRANSLATOR = Translator(_SHARED["catalogue"])


@pytest.mark.parametrize(("text", "translation"), _SHARED["cases"])
def test_texts_are_translated_by_their_templates(text: str, translation: str) -> None:
    assert TRANSLATOR.translate(text) == translation


@given(
    st.text(max_size=300)
    | st.lists(st.sampled_from(["ab ", "; ", ": ", " of ", "{}", "{1}", "x"])).map("".join)
)
def test_any_text_is_accepted(text: str) -> None:
    assert TRANSLATOR.translate(text) or not text


@pytest.mark.parametrize("part", ["ab ", "; ab ", ": : ", "; : ", " of ", "a, b and "])
def test_hostile_texts_of_any_length_are_translated_at_once(part: str) -> None:
    chinese().translate(part * 1_000)
    assert chinese().translate(part * 100_000) == part * 100_000
