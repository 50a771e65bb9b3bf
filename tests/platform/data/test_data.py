"""Reading, tokenizing, splitting and ordering: real files, the real ``datasets`` and ``tokenizers``."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from transformers import AutoTokenizer

from share_compute.data import DigitSamples, StepOrder, TextSamples, prepare
from share_compute.data.reading import PIECE_CHARACTERS, read_pieces
from share_compute.data.samples import SPLITS, SplitSizes
from share_compute.data.tokenization import END_OF_DOCUMENT
from share_compute.data.tokens import token_dtype
from share_compute.errors import Unavailable, UserError
from share_compute.specification import TrainJob, parse_job

GOLDEN_ORDER = [0, 3, 7, 5, 1, 2, 6, 4]
SENTENCES = "".join(f"Machine {n} lends {n * 7 % 13} cores; the cluster thanks it.\n" for n in range(400))


def job(file: Path | list[Path], **changes: Any) -> TrainJob:
    files = [str(one) for one in ([file] if isinstance(file, Path) else file)]
    fields: dict[str, Any] = {
        "model": {"config": {"model_type": "llama", "vocab_size": 400}},
        "data": {"files": files, **changes.pop("data", {})},
        "training": {"sequence_length": 16, **changes.pop("training", {})},
    }
    return parse_job({**fields, **changes})


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text(SENTENCES, encoding="utf-8")
    return file


def all_tokens(samples: Any) -> list[int]:
    """Undo the chunks: the first input, then every target."""
    tokens: list[int] = []
    for split in SPLITS:
        inputs, targets = samples.take(split, range(samples.size(split)))
        if not tokens and len(inputs):
            tokens.append(int(inputs[0, 0]))
        tokens.extend(targets.reshape(-1).tolist())
    return tokens


class TestStepOrder:
    @given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 90), st.integers(1, 6), st.booleans())
    def test_each_pass_visits_each_sample_once(
        self, seed: int, size: int, batch_size: int, passes: int, shuffle: bool
    ) -> None:
        order = StepOrder(seed, size, batch_size, shuffle)
        steps = -(-passes * size // batch_size)
        walk = np.concatenate([order.indices(step) for step in range(1, steps + 1)])
        for number in range(passes):
            assert sorted(walk[number * size : (number + 1) * size]) == list(range(size))

    @given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 1000))
    def test_a_step_does_not_depend_on_the_steps_before(self, size: int, batch_size: int, step: int) -> None:
        order = StepOrder(3, size, batch_size)
        pass_number, offset = order.position(step)
        assert pass_number * size + offset == (step - 1) * batch_size
        assert np.array_equal(order.indices(step), StepOrder(3, size, batch_size).indices(step))

    def test_passes_and_seeds_differ(self) -> None:
        first = StepOrder(0, 100, 100).indices(1)
        assert not np.array_equal(first, StepOrder(0, 100, 100).indices(2))
        assert not np.array_equal(first, StepOrder(1, 100, 100).indices(1))

    def test_the_order_is_the_same_on_every_machine_and_version(self) -> None:
        assert StepOrder(0, 8, 8).indices(1).tolist() == GOLDEN_ORDER

    def test_unshuffled_goes_from_first_to_last(self) -> None:
        assert StepOrder(0, 5, 3, shuffle=False).indices(2).tolist() == [3, 4, 0]

    @given(st.integers(1, 50), st.integers(1, 5), st.integers(1, 5), st.integers(1, 100), st.booleans())
    def test_branches_divide_the_samples_of_one_large_step(
        self, size: int, batch_size: int, branches: int, step: int, shuffle: bool
    ) -> None:
        parts = [
            StepOrder(3, size, batch_size, shuffle, branches, branch).indices(step)
            for branch in range(branches)
        ]
        whole = StepOrder(3, size, branches * batch_size, shuffle).indices(step)
        assert np.array_equal(np.concatenate(parts), whole)

    def test_there_is_no_branch_beyond_the_last(self) -> None:
        with pytest.raises(ValueError, match="no branch 2 of 2"):
            StepOrder(0, 5, 3, branches=2, branch=2)

    def test_steps_count_from_one(self) -> None:
        with pytest.raises(ValueError, match="counted from 1"):
            StepOrder(0, 5, 3).indices(0)


class TestChunks:
    @given(
        st.integers(0, 500),
        st.integers(2, 40),
        st.floats(0, 0.5, exclude_max=True),
        st.floats(0, 0.5, exclude_max=True),
    )
    def test_every_token_but_the_first_is_a_target_once(
        self, num_tokens: int, length: int, validation: float, test: float
    ) -> None:
        total = TextSamples.count(num_tokens, length)
        sizes = SplitSizes.of(total, validation, test)
        assert sizes.train + sizes.validation + sizes.test == total
        assert sizes.train >= min(total, 1)
        row = np.arange(num_tokens, dtype=np.uint16)
        samples = TextSamples(row, length, sizes)
        assert all_tokens(samples) == (list(range(total * length + 1)) if total else [])
        assert num_tokens - (total * length + 1) < length

    def test_targets_are_the_inputs_shifted(self) -> None:
        samples = TextSamples(np.arange(20, dtype=np.uint16), 4, SplitSizes(3, 1, 0))
        inputs, targets = samples.take("train", [2, 0])
        assert inputs.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
        assert targets.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
        assert inputs.dtype == targets.dtype == np.int64
        assert samples.take("train", [])[0].shape == (0, 4)

    @pytest.mark.parametrize("index", [-1, 3])
    def test_an_index_outside_its_split_is_refused(self, index: int) -> None:
        samples = TextSamples(np.arange(20, dtype=np.uint16), 4, SplitSizes(3, 1, 0))
        with pytest.raises(IndexError, match="train split has 3 samples"):
            samples.take("train", [index])


class TestText:
    def test_a_text_file_is_one_document_and_comes_back_whole(self, corpus: Path, tmp_path: Path) -> None:
        prepared = prepare(job(corpus), tmp_path / "data")
        assert prepared.tokenizer_folder is not None
        tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
        text = tokenizer.decode(all_tokens(prepared.samples))
        assert (SENTENCES + END_OF_DOCUMENT).startswith(text)
        assert prepared.counts.documents == 1
        assert prepared.counts.tokens == len(tokenizer.encode(SENTENCES)) + 1
        assert prepared.vocab_size is not None
        assert prepared.vocab_size <= 400

    def test_rows_are_documents_each_ended(self, tmp_path: Path) -> None:
        rows = [{"body": "one two"}, {"body": None}, {"body": ""}, {"body": "three"}, {"body": SENTENCES}]
        lines = tmp_path / "rows.jsonl"
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = tmp_path / "rows.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), table)
        decoded = []
        for file in (lines, table):
            prepared = prepare(job(file, data={"text_column": "body"}), tmp_path / file.suffix)
            assert prepared.counts.documents == 3
            tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
            decoded.append(tokenizer.decode(all_tokens(prepared.samples)))
        assert decoded[0] == decoded[1]
        assert decoded[0].startswith(f"one two{END_OF_DOCUMENT}three{END_OF_DOCUMENT}Machine 0")

    @pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
    def test_reading_calls_no_other_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
    ) -> None:
        requests: list[object] = []

        def refuse(*address: object, **_: object) -> None:
            requests.append(address)
            raise OSError("no network here")

        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        file = tmp_path / f"rows{suffix}"
        if suffix == ".parquet":
            parquet.write_table(pa.table({"text": [SENTENCES]}), file)
        else:
            file.write_text(SENTENCES if suffix == ".txt" else json.dumps({"text": SENTENCES}))
        folder = prepare(job(file), tmp_path / "data").tokenizer_folder
        prepare(job(file, tokenizer={"path": str(folder)}), tmp_path / "other")
        assert requests == []

    def test_rows_may_differ_in_their_other_columns(self, tmp_path: Path) -> None:
        file = tmp_path / "mixed.jsonl"
        file.write_text(
            '{"text": "one", "id": 1}\n\n{"id": "x", "text": "two", "more": {"a": [1]}}\n{"id": null}\n'
        )
        assert [piece.text for piece in read_pieces([file], "text")] == ["one", "two"]

    def test_damaged_parquet_is_a_user_error(self, tmp_path: Path) -> None:
        file = tmp_path / "rows.parquet"
        parquet.write_table(pa.table({"text": ["some text"] * 50}), file)
        whole, refused = file.read_bytes(), 0
        for place in range(4, len(whole), 7):  # damaged sizes make pyarrow ask for any amount of memory
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
            try:
                list(read_pieces([file], "text"))
            except UserError:
                refused += 1
        assert refused > 10

    @pytest.mark.parametrize("name", ["a [1].txt", "*.txt", ".hidden.txt", "ünï.txt"])
    def test_any_file_name_is_taken_literally(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "other.txt").write_text("other\n")
        (tmp_path / name).write_text("\ufeffthis\r\none", encoding="utf-8", newline="")
        pieces = list(read_pieces([tmp_path / name], "text"))
        assert "".join(piece.text for piece in pieces) == "this\none"

    @pytest.mark.parametrize("text", ["x" * 150_000, "word " * 40_000, "line\n" * 40_000])
    def test_long_texts_travel_in_pieces(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "long.txt"
        file.write_text(text)
        pieces = list(read_pieces([file], "text"))
        assert "".join(piece.text for piece in pieces) == text
        assert max(len(piece.text) for piece in pieces) <= PIECE_CHARACTERS
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        shares = [piece.read for piece in pieces]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0

    def test_prepared_data_is_used_again_until_its_source_changes(self, corpus: Path, tmp_path: Path) -> None:
        folder, calls = tmp_path / "data", []
        spec = job(corpus)
        first = prepare(spec, folder, lambda what, share: calls.append((what, share)))
        assert {what for what, _ in calls} == {"training the tokenizer", "tokenizing"}
        assert all(0 <= share <= 1 for _, share in calls)
        calls.clear()
        again = prepare(spec, folder, lambda what, share: calls.append((what, share)))
        assert not calls
        assert all_tokens(again.samples) == all_tokens(first.samples)
        corpus.write_text(SENTENCES.upper())
        changed = prepare(spec, folder, lambda what, share: calls.append((what, share)))
        assert calls
        assert all_tokens(changed.samples) != all_tokens(first.samples)

    def test_a_cut_off_token_file_is_made_anew(self, corpus: Path, tmp_path: Path) -> None:
        first = all_tokens(prepare(job(corpus), tmp_path / "data").samples)
        tokens = tmp_path / "data" / "tokens.bin"
        tokens.write_bytes(tokens.read_bytes()[:-2])
        assert all_tokens(prepare(job(corpus), tmp_path / "data").samples) == first

    def test_nothing_but_the_result_stays_in_the_folder(self, corpus: Path, tmp_path: Path) -> None:
        prepare(job(corpus), tmp_path / "data")
        assert {file.name for file in (tmp_path / "data").iterdir()} == {
            "tokenizer",
            "tokens.bin",
            "tokens.json",
        }

    def test_small_splits_become_empty_with_a_note(self, tmp_path: Path) -> None:
        file = tmp_path / "small.txt"
        file.write_text("a bcd efg hij klm nop qrs tuv wxyz. " * 2)
        prepared = prepare(job(file), tmp_path / "data")
        assert prepared.counts.validation == 0
        assert any("validation split is empty" in note for note in prepared.notes)
        assert any("400 were asked for" in note for note in prepared.notes)

    @pytest.mark.parametrize(("size", "dtype"), [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
    def test_the_dtype_holds_every_id(self, size: int, dtype: str) -> None:
        assert token_dtype(size) == dtype
        assert np.iinfo(dtype).max >= size - 1


class TestOwnFiles:
    """Text for validation and the test in files of their own."""

    @pytest.fixture
    def files(self, corpus: Path, tmp_path: Path) -> dict[str, Path]:
        found = {"files": corpus}
        for name, word in (("validation_files", "Cat"), ("test_files", "Dog")):
            found[name] = tmp_path / f"{word}.txt"
            found[name].write_text("".join(f"{word} {n} sleeps all day.\n" for n in range(40)))
        return found

    def decoded(self, files: dict[str, Path], tmp_path: Path, **data: Any) -> dict[str, str]:
        """Return the text of each split."""
        own = {name: [str(file)] for name, file in files.items() if name != "files"}
        prepared = prepare(job(files["files"], data={**own, **data}), tmp_path / "data")
        assert prepared.tokenizer_folder is not None
        tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
        samples, texts = prepared.samples, dict[str, str]()
        for split in SPLITS:
            inputs, targets = samples.take(split, range(samples.size(split)))
            texts[split] = tokenizer.decode([int(inputs[0, 0]), *targets.reshape(-1).tolist()])
        return texts

    def test_they_are_used_whole_and_training_is_as_without_them(
        self, files: dict[str, Path], corpus: Path, tmp_path: Path
    ) -> None:
        texts = self.decoded(files, tmp_path)
        for split in SPLITS:
            file = files["files" if split == "train" else f"{split}_files"]
            whole = file.read_text() + END_OF_DOCUMENT
            assert whole.startswith(texts[split])
            assert len(whole) - len(texts[split]) < 150  # less than a sample
        alone = prepare(job(corpus, data={"validation_fraction": 0, "test_fraction": 0}), tmp_path / "alone")
        own = {name: [str(file)] for name, file in files.items() if name != "files"}
        beside = prepare(job(corpus, data=own), tmp_path / "data")
        size = alone.samples.size("train")
        assert beside.samples.size("train") == size
        for one, other in zip(
            alone.samples.take("train", range(size)), beside.samples.take("train", range(size)), strict=True
        ):
            assert np.array_equal(one, other)
        assert beside.vocab_size == alone.vocab_size
        assert beside.counts.documents == 3

    def test_the_other_split_is_cut_from_the_end_of_the_training_files(
        self, files: dict[str, Path], tmp_path: Path
    ) -> None:
        del files["test_files"]
        texts = self.decoded(files, tmp_path, test_fraction=0.2)
        assert texts["validation"].startswith("Cat 0 ")
        assert texts["train"] in SENTENCES
        assert texts["test"] in SENTENCES
        assert "Machine 395" in texts["test"]
        files["test_files"] = files.pop("validation_files")
        texts = self.decoded(files, tmp_path, validation_fraction=0.2)
        assert texts["test"].startswith("Cat 0 ")
        assert "Machine 395" in texts["validation"]

    def test_a_file_too_short_for_a_sample_names_its_field(
        self, files: dict[str, Path], tmp_path: Path
    ) -> None:
        files["validation_files"].write_text("abc")
        with pytest.raises(UserError, match=r"data.validation_files has 4 tokens; one sample .* needs 17"):
            self.decoded(files, tmp_path)

    def test_text_for_training_is_no_text_for_validation(self, files: dict[str, Path]) -> None:
        own = [str(files["files"])]
        with pytest.raises(UserError, match=r"validation_files names .*corpus.txt, which data has already"):
            job(files["files"], data={"validation_files": own})
        assert job([files["files"]] * 2).data.files == (files["files"],) * 2
        with pytest.raises(UserError, match=r"test_files needs data.files"):
            parse_job(
                {
                    "model": {"layers": [{"type": "linear"}]},
                    "data": {"dataset": "digits", "test_files": own},
                }
            )


class TestTokenizers:
    @pytest.fixture
    def trained(self, corpus: Path, tmp_path: Path) -> Path:
        prepared = prepare(job(corpus), tmp_path / "trained")
        assert prepared.tokenizer_folder is not None
        return prepared.tokenizer_folder

    def test_a_folder_gives_the_same_tokens(self, corpus: Path, trained: Path, tmp_path: Path) -> None:
        one = prepare(job(corpus, tokenizer={"path": str(trained)}), tmp_path / "data")
        two = prepare(job(corpus), tmp_path / "trained")
        assert all_tokens(one.samples) == all_tokens(two.samples)
        assert one.vocab_size == two.vocab_size

    def test_a_model_folder_brings_its_tokenizer(self, corpus: Path, trained: Path, tmp_path: Path) -> None:
        (trained / "config.json").write_text('{"model_type": "llama", "vocab_size": 1000}')
        spec = job(corpus, model={"path": str(trained)})
        prepared = prepare(spec, tmp_path / "data")
        assert prepared.tokenizer_folder is not None
        assert prepared.vocab_size is not None
        assert prepared.vocab_size <= 400

    def test_a_tokenizer_larger_than_the_model_is_refused(
        self, corpus: Path, trained: Path, tmp_path: Path
    ) -> None:
        small = {"config": {"model_type": "llama", "vocab_size": 300}}
        with pytest.raises(
            UserError, match=r"tokenizer has \d+ tokens, but the model's vocab_size is 300"
        ) as caught:
            prepare(job(corpus, model=small, tokenizer={"path": str(trained)}), tmp_path / "data")
        assert caught.value.hint
        with pytest.raises(UserError, match="512 tokens, but the model's vocab_size is 300"):
            prepare(job(corpus, model=small, tokenizer={"vocab_size": 512}), tmp_path / "data")

    def test_a_vocabulary_too_small_for_bytes_is_refused(self, corpus: Path, tmp_path: Path) -> None:
        tiny = {"config": {"model_type": "llama", "vocab_size": 100}}
        with pytest.raises(UserError, match="bytes alone need 257"):
            prepare(job(corpus, model=tiny), tmp_path / "data")

    @pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
    def test_a_folder_without_a_usable_tokenizer_is_refused(
        self, corpus: Path, tmp_path: Path, content: str | None
    ) -> None:
        folder = tmp_path / "broken"
        folder.mkdir()
        if content is not None:
            (folder / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match="tokenizer") as caught:
            prepare(job(corpus, tokenizer={"path": str(folder)}), tmp_path / "data")
        assert caught.value.hint


class TestBadData:
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("latin.txt", "caf\xe9 au lait\n".encode("latin-1"), "not UTF-8"),
            ("utf16.txt", "text".encode("utf-16"), "not UTF-8"),
            ("empty.txt", b"", "is empty"),
            ("broken.jsonl", b'{"text": "a"}\n{"text":\n', "line 2 of data file .* is not JSON"),
            ("list.jsonl", b'["a", "b"]\n', "line 1 of data file .* is not a JSON object"),
            ("half.jsonl", b'{"text": "\\ud800"}\n', "not UTF-8"),
            ("late.jsonl", b'{"text": "a"}\n' * 2500 + b"}\n", "line 2501 of"),
            ("latin.jsonl", b'{"text": "caf\xe9"}\n', "not UTF-8"),
            ("numbers.jsonl", b'{"text": 3}\n', "holds int, not text"),
            ("junk.parquet", b"PAR1 junk", "cannot be read as .parquet"),
        ],
    )
    def test_the_file_and_the_hint_are_named(
        self, tmp_path: Path, name: str, content: bytes, message: str
    ) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message) as caught:
            prepare(job(tmp_path / name), tmp_path / "data")
        assert name in caught.value.message
        assert caught.value.hint

    @pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
    def test_a_missing_column_names_those_there_are(self, tmp_path: Path, suffix: str) -> None:
        file = tmp_path / f"rows{suffix}"
        if suffix == ".jsonl":
            file.write_text('{"id": 1, "texts": "a"}\n')
        else:
            parquet.write_table(pa.table({"id": [1], "texts": ["a"]}), file)
        with pytest.raises(UserError, match="no column 'text'; did you mean 'texts'") as caught:
            prepare(job(file), tmp_path / "data")
        assert caught.value.details == {"columns": ["id", "texts"]}
        assert "id, texts" in str(caught.value.hint)

    def test_a_missing_file_or_a_folder_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "folder.txt").mkdir()
        for name, message in (("none.txt", "does not exist"), ("folder.txt", "is not a file")):
            with pytest.raises(UserError, match=message):
                prepare(job(tmp_path / name), tmp_path / "data")

    def test_a_corpus_shorter_than_one_sequence_says_how_many_tokens(self, tmp_path: Path) -> None:
        file = tmp_path / "short.txt"
        file.write_text("abc")
        with pytest.raises(
            UserError, match=r"has 4 tokens; one sample of sequence_length 16 needs 17"
        ) as caught:
            prepare(job(file), tmp_path / "data")
        assert caught.value.details == {"tokens": 4, "needed": 17}

    def test_rows_without_any_text_are_a_corpus_too_short(self, tmp_path: Path) -> None:
        file = tmp_path / "void.jsonl"
        file.write_text('{"text": ""}\n{"text": null}\n')
        with pytest.raises(UserError, match="has 0 tokens"):
            prepare(job(file), tmp_path / "data")

    @pytest.mark.parametrize("limit_bytes", [1_000, 100_000])
    def test_a_disk_that_refuses_leaves_nothing_half_written(
        self, corpus: Path, tmp_path: Path, limit_bytes: int
    ) -> None:
        corpus.write_text(SENTENCES * 10)
        _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        try:
            with pytest.raises(Unavailable, match=r"cannot write to .*: File too large") as caught:
                prepare(job(corpus), tmp_path / "data")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "free some disk space" in str(caught.value.hint)
        assert not list((tmp_path / "data").glob("tokens*"))
        assert prepare(job(corpus), tmp_path / "data").counts.train > 0

    def test_a_folder_that_cannot_be_made_is_unavailable(self, corpus: Path) -> None:
        with pytest.raises(Unavailable, match="cannot write") as caught:
            prepare(job(corpus), corpus / "data")
        assert caught.value.hint


class TestDigits:
    def spec(self, seed: int = 0) -> TrainJob:
        return parse_job(
            {
                "model": {"layers": [{"type": "linear"}]},
                "data": {"dataset": "digits"},
                "training": {"seed": seed},
            }
        )

    def test_the_splits_hold_every_digit_once(self, tmp_path: Path) -> None:
        samples = prepare(self.spec(), tmp_path).samples
        parts = [samples.take(split, range(samples.size(split))) for split in SPLITS]
        whole = DigitSamples.load(1, 0.0, 0.0)
        pixels = np.concatenate([inputs for inputs, _ in parts])
        assert pixels.shape == (1797, 64)
        assert pixels.dtype == np.float32
        assert pixels.min() == 0.0
        assert pixels.max() == 1.0
        other, labels = whole.take("train", range(1797))
        assert sorted(map(bytes, pixels)) == sorted(map(bytes, other))
        assert set(labels.tolist()) == set(range(10))

    def test_the_seed_alone_decides_the_split(self, tmp_path: Path) -> None:
        one, two, three = (
            prepare(self.spec(seed), tmp_path).samples.take("test", range(89))[0] for seed in (0, 0, 1)
        )
        assert np.array_equal(one, two)
        assert not np.array_equal(one, three)

    def test_there_is_no_tokenizer(self, tmp_path: Path) -> None:
        prepared = prepare(self.spec(), tmp_path)
        assert prepared.tokenizer_folder is None
        assert prepared.vocab_size is None
        assert prepared.counts.tokens is None
