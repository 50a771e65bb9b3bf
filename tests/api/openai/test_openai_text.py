"""Tokens into text: whole characters, stop strings across tokens, and the position of each token in the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.api.speaking import make_tokenizer
from tokenizers import Tokenizer, decoders, models

from share_compute.errors import TooLong, UserError
from share_compute.inference.scheduler.events import Emitted, Finished
from share_compute_api.openai.writing import Detokenizer, FullAnswer, StopStrings, Writer
from share_compute_api.workers.isolated.tokenizer import ServedTokenizer
from share_compute_api.workers.isolated.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(files: Path) -> ServedTokenizer:
    return ServedTokenizer(files)


@pytest.fixture(scope="module")
def library(files: Path) -> Tokenizer:
    """The library's own tokenizer."""
    return Tokenizer.from_file(str(files / "tokenizer.json"))


def spoken(tokenizer: Any, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.flush()]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_text_comes_out_as_it_went_in(tokenizer: ServedTokenizer, library: Tokenizer, text: str) -> None:
    ids = library.encode(text, add_special_tokens=False).ids
    pieces = spoken(tokenizer.vocabulary, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_tokens_give_what_they_give_together(tokenizer: ServedTokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocabulary.vocab_size - 1), max_size=40))
    assert "".join(spoken(tokenizer.vocabulary, ids)) == tokenizer.vocabulary.decode(ids)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_text_is_what_the_library_makes_of_tokens(
    tokenizer: ServedTokenizer, library: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocabulary.vocab_size - 1), max_size=20))
    assert tokenizer.vocabulary.decode(ids) == library.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_special_tokens_can_be_text(
    tokenizer: ServedTokenizer, library: Tokenizer, data: st.DataObject
) -> None:
    vocabulary = tokenizer.vocabulary
    one = st.integers(0, vocabulary.vocab_size - 1) | st.sampled_from(sorted(vocabulary.special))
    ids = data.draw(st.lists(one, max_size=20))
    text = library.decode(ids, skip_special_tokens=False)
    assert vocabulary.with_special.decode(ids) == text
    assert "".join(spoken(vocabulary.with_special, ids)) == text
    assert vocabulary.decode(ids) == library.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        decoders.Metaspace(),
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        None,
    ],
    ids=lambda decoder: type(decoder).__name__,
)
def test_all_decoders_write_as_the_library_does(decoder: Any) -> None:
    llama = Llama()
    if decoder is not None:
        llama.fast.decoder = decoder
    else:
        llama.fast = Tokenizer(models.BPE(llama.vocabulary, [], unk_token="<unk>", byte_fallback=True))
    state = llama.fast.decoder
    vocabulary = Vocabulary.model_validate(
        {
            "tokens": list(llama.vocabulary),
            "added": [],
            "special": [],
            "end_ids": [],
            "decoder": json.loads(state.__getstate__()) if state else None,
        }
    )
    for ids in ([2, 3, 4], [5, 6 + 0xC3, 6 + 0xA9], [2, 6 + 0xF0, 4], [4] * 3, []):
        assert vocabulary.decode(ids) == llama.fast.decode(ids)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_decoder_that_makes_text_much_longer_is_refused(is_alone: bool) -> None:
    replace = decoders.Replace("a", "b" * 17)
    decoder = replace if is_alone else decoders.Sequence([replace])
    with pytest.raises(ValidationError, match="17 times as long; at most 16 times"):
        Vocabulary.model_validate(
            {
                "tokens": ["a"],
                "added": [],
                "special": [],
                "end_ids": [],
                "decoder": json.loads(decoder.__getstate__()),
            }
        )


class Llama:
    """A tokenizer as SentencePiece makes them: spaces belong to the next word, bytes have tokens."""

    def __init__(self) -> None:
        words = [
            "<unk>",
            "<s>",
            "\u2581Hello",
            "\u2581world",
            "!",
            "\u2581",
            *(f"<0x{byte:02X}>" for byte in range(256)),
        ]
        self.vocabulary = {word: index for index, word in enumerate(words)}
        self.fast = Tokenizer(models.BPE(self.vocabulary, [], unk_token="<unk>", byte_fallback=True))
        self.fast.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        self.fast.add_special_tokens(["<s>"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.fast.decode(list(ids)))

    def is_special(self, id_: int) -> bool:
        return id_ == self.vocabulary["<s>"]

    def ids(self, *words: str) -> list[int]:
        return [self.vocabulary[word] for word in words]


def test_the_space_between_prompt_and_answer_is_kept() -> None:
    llama = Llama()
    prompt = llama.ids("<s>", "\u2581Hello")
    assert spoken(llama, llama.ids("\u2581world", "!"), prompt) == [" world", "!", ""]
    assert spoken(llama, llama.ids("\u2581world"), llama.ids("<s>")) == ["world", ""]


def test_characters_of_several_bytes_wait_until_they_are_whole() -> None:
    llama = Llama()
    bytes_ = [f"<0x{byte:02X}>" for byte in "é😀".encode()]
    assert spoken(llama, llama.ids("\u2581Hello", *bytes_)) == ["Hello", "", "é", "", "", "", "😀", ""]
    broken = spoken(llama, llama.ids("<0xF0>", "<0x9F>"))
    assert broken == ["", "", "\ufffd\ufffd"]


class Counting:
    """Counts how much is decoded."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._tokenizer = tokenizer
        self.longest = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(ids))
        return self._tokenizer.vocabulary.decode(ids)

    def is_special(self, id_: int) -> bool:
        return self._tokenizer.vocabulary.is_special(id_)


@pytest.mark.parametrize("word", ["<|end|>", "\u00ff"], ids=["special tokens", "broken bytes"])
def test_a_token_costs_the_same_in_a_long_text(
    tokenizer: ServedTokenizer, library: Tokenizer, word: str
) -> None:
    counting = Counting(tokenizer)
    id_ = library.token_to_id(word)
    spoken(counting, [id_] * 500)
    assert counting.longest < 20


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
)
def test_a_text_ends_before_its_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    text, shown, stop_strings = "".join(pieces), "", StopStrings(stops)
    for piece in pieces:
        shown += stop_strings.push(piece)
        assert not any(stop in shown for stop in stops)
        if stop_strings.found:
            break
    shown += stop_strings.flush()
    places = [text.find(stop) for stop in stops if stop in text]
    if not stop_strings.found:
        assert places == []
        assert shown == text
        return
    # If two stop strings overlap, the one that is complete first ends the text.
    assert text.startswith(shown)
    assert any(text.startswith(stop, len(shown)) for stop in stops)


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    later=st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
)
def test_a_stop_string_that_is_complete_too_early_is_text(
    pieces: list[str], later: list[str], stops: list[str]
) -> None:
    stop_strings, early = StopStrings(stops), "".join(pieces)
    shown = "".join(stop_strings.push(piece, may_end=False) for piece in pieces)
    assert early.startswith(shown)
    assert not stop_strings.found
    for piece in later:
        shown += stop_strings.push(piece)
        if stop_strings.found:
            break
    shown += stop_strings.flush()
    text = early + "".join(later)
    assert text.startswith(shown)
    ends = [text.find(stop, max(0, len(early) - len(stop) + 1)) for stop in stops]
    assert stop_strings.found == any(end >= 0 for end in ends)
    if not stop_strings.found:
        assert shown == text


def test_as_little_as_possible_is_held_back() -> None:
    stop_strings = StopStrings(["END", "xyz"])
    assert [stop_strings.push(piece) for piece in ("say E", "N", "d of E", "x")] == [
        "say ",
        "",
        "ENd of ",
        "E",
    ]
    assert stop_strings.flush() == "x"


def written(tokenizer: ServedTokenizer, ids: Sequence[int], **options: Any) -> tuple[FullAnswer, list[str]]:
    writer = Writer(tokenizer.vocabulary, (), keeps_tokens=True, **options)
    answer, pieces = FullAnswer(), []
    for index, event in enumerate([*ids, None]):
        finished = Finished(1, "stop", len(ids))
        piece = writer.read(finished if event is None else Emitted(1, index, event, -0.5, ()))
        answer.add(piece)
        pieces.append(piece.text)
        if piece.finish is not None:
            break
    return answer, pieces


def test_tokens_come_with_the_text_that_they_make(tokenizer: ServedTokenizer) -> None:
    ids = tokenizer.encode("fox 😀 stop here", 99)
    answer, _ = written(tokenizer, ids)
    assert answer.text == "fox 😀 stop here"
    assert (
        b"".join(tokenizer.vocabulary.token_bytes(one.emitted.token) for one in answer.tokens).decode()
        == answer.text
    )
    cut, pieces = written(tokenizer, ids, stops=["stop"])
    assert cut.text == "fox 😀 "
    assert "".join(pieces) == cut.text
    assert all(one.offset < len(cut.text) for one in cut.tokens)
    assert (
        b"".join(tokenizer.vocabulary.token_bytes(one.emitted.token) for one in cut.tokens).decode().strip()
        == "fox 😀"
    )


def test_an_end_of_text_is_no_text(tokenizer: ServedTokenizer) -> None:
    (end,) = tokenizer.vocabulary.end_ids
    ids = [*tokenizer.encode("fox", 99), end]
    answer, _ = written(tokenizer, ids, end_ids=tokenizer.vocabulary.end_ids)
    assert (answer.text, answer.finish) == ("fox", "stop")
    assert end not in [one.emitted.token for one in answer.tokens]


def test_stop_strings_wait_for_min_tokens(tokenizer: ServedTokenizer) -> None:
    ids = tokenizer.encode("fox and fox", 99)
    first = next(count for count in range(99) if "fox" in tokenizer.vocabulary.decode(ids[:count]))
    for min_tokens, text in ((0, ""), (first - 1, ""), (first, "fox and "), (len(ids), "fox and fox")):
        answer, _ = written(tokenizer, ids, stops=["fox"], min_tokens=min_tokens)
        assert answer.text == text


def test_prompts_are_bounded(tokenizer: ServedTokenizer) -> None:
    with pytest.raises(TooLong, match="more than 8 tokens"):
        tokenizer.encode("x" * 1_000_000, 8)
    with pytest.raises(TooLong, match="has 9 tokens"):
        tokenizer.vocabulary.check([1] * 9, 8)
    with pytest.raises(UserError, match="no tokens"):
        tokenizer.encode("", 8)
    with pytest.raises(UserError, match="vocabulary ends at"):
        tokenizer.vocabulary.check([10**6], 8)


def test_ends_of_text_come_from_all_places(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert ServedTokenizer(folder).vocabulary.end_ids == (
        ServedTokenizer(folder).vocabulary.special_id("<|end|>"),
        5,
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert ServedTokenizer(folder).vocabulary.end_ids[1:] == (7, 9)


def test_a_folder_without_a_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded"):
        ServedTokenizer(tmp_path)
