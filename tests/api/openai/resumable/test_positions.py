"""Positions are written and read again, and all other texts are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from share_compute.errors import UserError
from share_compute_api.openai.resumable.positions import SentAnswer, StreamPosition

counts = st.integers(0, 10**9 - 1)
answers = st.one_of(
    st.builds(SentAnswer),
    st.builds(
        SentAnswer, has_begun=st.just(value=True), characters=counts, tokens=counts, has_ended=st.booleans()
    ),
    st.builds(
        SentAnswer,
        has_begun=st.just(value=True),
        characters=counts,
        tokens=counts,
        calls=st.integers(1, 10**9 - 1),
        argument_characters=counts,
        has_ended=st.booleans(),
    ),
)


@given(st.lists(answers, min_size=1, max_size=128))
def test_positions_are_read_as_they_were_written(sent: list[SentAnswer]) -> None:
    position = StreamPosition(sent, has_usage=all(answer.has_ended for answer in sent))
    assert StreamPosition.parse(str(position), len(sent)) == position
    assert len(str(position)) <= 8192


def test_a_stream_begins_with_nothing() -> None:
    assert str(StreamPosition.start(3)) == "-,-,-"
    assert StreamPosition.parse("-,12:3.,0", 3) == StreamPosition(
        [
            SentAnswer(),
            SentAnswer(has_begun=True, characters=12, tokens=3, has_ended=True),
            SentAnswer(has_begun=True),
        ]
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1,2,3",
        "1,",
        "a,b",
        "1,-1",
        "1, 2",
        "1,2+",
        "1.,2.++",
        "1.,2.+x",
        "1:,2",
        "1~,2",
        "1~2,2",
        "1~0/0,2",
        "1~/3,2",
        "1~2/3:4,2",
        "~2/3,2",
        "1,1234567890",
        "\u0661,1",
        "-.,1",
    ],
)
@pytest.mark.parametrize("num_answers", [2])
def test_other_texts_are_refused(text: str, num_answers: int) -> None:
    with pytest.raises(UserError, match="is not the id of an event of this stream") as caught:
        StreamPosition.parse(text, num_answers)
    assert len(caught.value.message) < 200
    assert "unchanged" in (caught.value.hint or "")
