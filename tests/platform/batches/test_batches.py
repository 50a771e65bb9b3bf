"""Batches without a model: rows of files, complete and missing parts, and the output that is made from them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from share_compute.batches import inputs as inputs_module
from share_compute.batches.inputs import InputRow, Inputs, Survey
from share_compute.batches.output import Format, check_columns, write_output
from share_compute.batches.parts import COLUMNS, Parts
from share_compute.errors import Conflict, UserError, VerificationFailed
from share_compute.specification import EmbedJob, GenerateJob, parse_any_job, parse_job, parse_submission

MODEL = {"path": "/models/a"}


def lines(file: Path, rows: Sequence[Any]) -> Path:
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


def table(file: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), file)
    return file


def all_rows(inputs: Inputs, size: int = 3, done: Sequence[int] = ()) -> list[InputRow]:
    return [row for _, rows in inputs.parts(size, done) for row in rows]


def answered(inputs: Inputs, parts: Parts, *, seed: int = 0) -> None:
    """Answer the missing rows, in any order: each answer is the text in capitals."""
    missing = list(inputs.parts(parts.size, frozenset(parts.done)))
    random.Random(seed).shuffle(missing)
    for number, rows in missing:
        parts.keep(number, [answer(row) for row in rows])


def answer(row: InputRow) -> dict[str, Any]:
    if row.problem is not None:
        return {"error": row.problem}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    return {"output": row.value.upper(), "finish_reason": "stop", "usage": usage}


def output(inputs: Inputs, folder: Path, format_: Format = "jsonl", *, seed: int = 0) -> list[dict[str, Any]]:
    parts = Parts(folder / "parts", "generate", inputs.survey(), MODEL)
    answered(inputs, parts, seed=seed)
    target = folder / f"output.{format_}"
    assert write_output(inputs, parts, target, format_) == target.stat().st_size
    assert [file.name for file in folder.glob(".*")] == []
    if format_ == "parquet":
        rows: list[dict[str, Any]] = parquet.read_table(target).to_pylist()
        return rows
    return [json.loads(line) for line in target.read_text().splitlines()]


class TestSpecification:
    def job(self, **changed: Any) -> dict[str, Any]:
        data = {"files": ["a.jsonl"], "prompt": "question"}
        return {"kind": "generate", "deployment": "poet", "data": data, **changed}

    def test_both_kinds_are_read(self) -> None:
        job = parse_any_job(self.job(sampling={"temperature": 0, "stop": ["."]}))
        assert isinstance(job, GenerateJob)
        assert parse_submission(job.model_dump(mode="json")) == job
        other = parse_any_job(
            {"kind": "embed", "model": {"path": "m"}, "data": {"files": ["a.parquet", "b.parquet"]}}
        )
        assert isinstance(other, EmbedJob)
        assert other.data.column == "text"

    def test_options_of_tokens_are_read_and_written(self) -> None:
        text = """
        kind: generate
        deployment: poet
        data: {files: [a.jsonl], prompt: question}
        sampling:
          logit_bias: {7: -100, "5": 0.5}
          stop_token_ids: [9, 5, 9]
          min_tokens: 4
          skip_special_tokens: false
        """
        job = parse_any_job(text)
        assert isinstance(job, GenerateJob)
        options = job.sampling
        assert options.logit_bias == ((5, 0.5), (7, -100.0))
        assert (options.stop_token_ids, options.min_tokens) == ((9, 5), 4)
        assert options.skip_special_tokens is False
        for written in (job.model_dump(mode="json"), job.model_dump(), job.model_dump_json()):
            assert parse_submission(written) == job
        none = dict.fromkeys(("logit_bias", "stop_token_ids", "min_tokens", "skip_special_tokens"))
        assert parse_any_job(self.job(sampling=none)) == parse_any_job(self.job())

    @pytest.mark.parametrize(
        ("changed", "problem"),
        [
            ({"model": {"path": "m"}}, "exactly one of deployment and model"),
            ({"deployment": None}, "exactly one of deployment and model"),
            ({"data": {"files": ["a.jsonl"]}}, "exactly one of prompt and messages"),
            ({"data": {"files": [], "prompt": "a"}}, "data.files"),
            ({"data": {"files": ["a.csv"], "prompt": "a"}}, "cannot read rows of a.csv"),
            ({"data": {"files": ["a.jsonl", "b.parquet"], "prompt": "a"}}, "several kinds"),
            ({"data": {"files": ["a.jsonl"], "promt": "a"}}, "did you mean 'prompt'"),
            ({"sampling": {"temperature": 3}}, "sampling.temperature"),
            ({"sampling": {"stop": [""]}}, "a stop string is empty"),
            ({"sampling": {"response_format": {"type": float("nan")}}}, "plain JSON"),
            (
                {"sampling": {"stop_token_ids": [5] * 65}},
                "sampling.stop_token_ids: at most 64 .*, these are 65",
            ),
            ({"sampling": {"stop_token_ids": [True]}}, "sampling.stop_token_ids: give a list of token ids"),
            ({"sampling": {"min_tokens": -1}}, "sampling.min_tokens"),
            ({"sampling": {"skip_special_tokens": "some"}}, "sampling.skip_special_tokens"),
            ({"sampling": {"logit_bias": {"5": -100.5}}}, "sampling.logit_bias: the bias of token id 5"),
            (
                {"sampling": {"logit_bias": {"5": float("nan")}}},
                "sampling.logit_bias: the bias of token id 5",
            ),
            ({"sampling": {"logit_bias": {5: 1, "5": 2}}}, "sampling.logit_bias: token id 5 has two biases"),
            (
                {"sampling": {"logit_bias": dict.fromkeys(range(301), 1)}},
                "sampling.logit_bias: at most 300 tokens",
            ),
            ({"sampling": {"logit_bias": [[5, 1]]}}, "sampling.logit_bias: give an object"),
            ({"kind": "genrate"}, "did you mean 'generate'"),
        ],
    )
    def test_what_is_wrong_is_named(self, changed: dict[str, Any], problem: str) -> None:
        with pytest.raises(UserError, match=problem):
            parse_any_job(self.job(**changed))

    def test_a_batch_is_no_training(self) -> None:
        with pytest.raises(UserError, match="kind: generate trains nothing"):
            parse_job(self.job())


class TestInputs:
    def test_rows_have_numbers_over_all_files(self, tmp_path: Path) -> None:
        first = lines(tmp_path / "a.jsonl", [{"q": "one"}, "", {"q": "two"}, "   "])
        second = lines(tmp_path / "b.jsonl", [{"q": "three"}])
        second.write_bytes(b"\xef\xbb\xbf" + second.read_bytes())
        inputs = Inputs([first, second], "q")
        rows = all_rows(inputs)
        assert [(row.number, row.value) for row in rows] == [(0, "one"), (1, "two"), (2, "three")]
        assert inputs.survey().rows == (2, 1)
        assert all_rows(inputs, 2, done=[0]) == rows[2:]
        assert all_rows(inputs, 1, done=[1]) == [rows[0], rows[2]]

    def test_parquet_has_the_same_rows(self, tmp_path: Path) -> None:
        values = [f"text {number}" for number in range(2500)]
        files = [
            table(tmp_path / "a.parquet", q=values[:1700]),
            table(tmp_path / "b.parquet", q=values[1700:]),
        ]
        inputs = Inputs(files, "q")
        assert [row.value for row in all_rows(inputs, 100)] == values
        assert inputs.survey().rows == (1700, 800)

    def test_a_row_that_cannot_be_read_is_a_row_with_a_problem(self, tmp_path: Path) -> None:
        file = lines(tmp_path / "a.jsonl", [{"q": "fine"}, "{", "[1]", {"other": 1}, {"q": None}])
        problems = [row.problem for row in all_rows(Inputs([file], "q"))]
        assert problems[0] is None
        assert str(problems[1]).startswith("the row is not JSON")
        assert problems[2] == "the row is not a JSON object"
        assert problems[3:] == ["column 'q' is missing or null"] * 2

    @pytest.mark.parametrize(
        ("rows", "problem"),
        [
            ([], "holds no rows"),
            (["", " "], "holds no rows"),
            ([{"text": "a"}], "no column 'question'"),
            ([{"questoin": "a"}], "did you mean 'questoin'"),
            ([{"question": "a"}, "{"], "line 2"),
            (["[]"], "not a JSON object"),
            ([{"question": 3}], "holds int, not text"),
            ([{"question": None}], "holds nothing, not text"),
            ([{"question": "a", "output": 1}], "into which answers are written"),
        ],
    )
    def test_first_rows_are_checked(self, tmp_path: Path, rows: list[Any], problem: str) -> None:
        good = lines(tmp_path / "good.jsonl", [{"question": "a"}])
        bad = lines(tmp_path / "bad.jsonl", rows)
        Inputs([good], "question").check(str, COLUMNS["generate"])
        with pytest.raises(UserError, match=problem):
            Inputs([good, bad], "question").check(str, COLUMNS["generate"])

    def test_files_that_are_not_what_their_names_say_are_refused(self, tmp_path: Path) -> None:
        file = lines(tmp_path / "a.parquet", [{"q": 1}])
        for check in (Inputs([file], "q").survey, lambda: Inputs([file], "q").check(str, ())):
            with pytest.raises(UserError, match="cannot be read"):
                check()
        with pytest.raises(UserError, match=r"cannot be read as \.jsonl: No such file"):
            Inputs([tmp_path / "gone.jsonl"], "q").survey()

    def test_a_line_without_end_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(inputs_module, "MOST_LINE_BYTES", 1 << 20)
        file = lines(tmp_path / "a.jsonl", [{"q": "a" * (1 << 20)}])
        with pytest.raises(UserError, match="a line of more than 1 MiB"):
            Inputs([file], "q").survey()


class TestParts:
    SURVEY = Survey((7,), ("digest",))

    def parts(self, folder: Path, **changed: Any) -> Parts:
        survey = changed.get("survey", self.SURVEY)
        return Parts(folder, "generate", survey, changed.get("model", MODEL))

    def test_what_is_kept_is_found_again(self, tmp_path: Path) -> None:
        parts = self.parts(tmp_path)
        parts.keep(3, [{"output": "a"}])
        parts.keep(0, [{"error": "b"}])
        for known in (parts, self.parts(tmp_path)):
            assert (known.done, known.rows_done, known.failed) == ({0, 3}, 2, 1)

    def test_parts_are_small_for_few_rows_and_bounded_for_many(self, tmp_path: Path) -> None:
        sizes = [
            self.parts(tmp_path / str(rows), survey=Survey((rows,), ("",))).size for rows in (1, 2000, 10**5)
        ]
        assert sizes == [1, 10, 256]

    def test_a_crash_before_the_rename_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parts = self.parts(tmp_path)

        def crash(self: Path, target: Path) -> None:
            raise OSError(f"{self} was not to be {target}")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", crash)
            with pytest.raises(OSError, match="was not to be"):
                parts.keep(0, [{"output": "a"}])
        assert parts.done == set()
        (tmp_path / ".part-00000000.parquet.1234.partial").write_bytes(b"half of a pa")
        again = self.parts(tmp_path)
        assert again.done == set()
        assert [file.name for file in tmp_path.iterdir()] == ["batch.json"]
        again.keep(0, [{"output": "b"}])
        assert self.parts(tmp_path).rows_done == 1

    def test_a_damaged_part_is_made_again(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        parts = self.parts(tmp_path)
        parts.keep(0, [{"output": "a"}])
        (file,) = tmp_path.glob("part-*")
        file.write_bytes(file.read_bytes()[:-9])
        again = self.parts(tmp_path)
        assert again.done == set()
        assert "is damaged" in caplog.text
        again.keep(0, [{"output": "a"}])
        assert self.parts(tmp_path).done == {0}

    def test_other_rows_and_other_models_are_refused(self, tmp_path: Path) -> None:
        self.parts(tmp_path)
        for survey in (Survey((8,), ("digest",)), Survey((7,), ("other",))):
            with pytest.raises(Conflict, match="the files changed"):
                self.parts(tmp_path, survey=survey)
        with pytest.raises(Conflict, match="another model"):
            self.parts(tmp_path, model={"path": "/models/b"})

    @pytest.mark.parametrize("format_", ["jsonl", "parquet"])
    @pytest.mark.parametrize("content", [None, b"PAR1 no more"])
    def test_an_input_that_cannot_be_read_any_more_is_named(
        self, tmp_path: Path, format_: Format, content: bytes | None
    ) -> None:
        file = table(tmp_path / "a.parquet", q=["a", "b"])
        inputs = Inputs([file], "q")
        parts = Parts(tmp_path / "parts", "generate", inputs.survey(), MODEL)
        answered(inputs, parts)
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.parquet cannot be read"):
            write_output(inputs, parts, tmp_path / "output", format_)

    def test_an_output_needs_all_parts(self, tmp_path: Path) -> None:
        inputs = Inputs([lines(tmp_path / "a.jsonl", [{"q": "a"}, {"q": "b"}])], "q")
        parts = Parts(tmp_path / "parts", "generate", inputs.survey(), MODEL)
        parts.keep(0, [{"output": "a"}])
        with pytest.raises(VerificationFailed, match="part 1"):
            write_output(inputs, parts, tmp_path / "output.jsonl", "jsonl")
        assert not (tmp_path / "output.jsonl").exists()


class TestOutput:
    def test_rows_come_in_order_with_their_columns(self, tmp_path: Path) -> None:
        rows = [{"q": f"text {number}", "id": number, "more": {"a": [1.5, None]}} for number in range(900)]
        inputs = Inputs([lines(tmp_path / "a.jsonl", rows)], "q")
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        expected = [
            {**row, "output": row["q"].upper(), "finish_reason": "stop", "usage": usage} for row in rows
        ]
        assert output(inputs, tmp_path / "one") == expected
        assert output(inputs, tmp_path / "other", seed=1) == expected
        assert output(inputs, tmp_path / "table", "parquet") == [{**row, "error": None} for row in expected]

    def test_errors_are_rows_too(self, tmp_path: Path) -> None:
        inputs = Inputs([lines(tmp_path / "a.jsonl", [{"q": "a"}, "{", {"id": 1}])], "q")
        first, second, third = output(inputs, tmp_path / "out")
        assert first["output"] == "A"
        assert list(second) == ["error"]
        assert third == {"id": 1, "error": "column 'q' is missing or null"}

    def test_parquet_keeps_its_types(self, tmp_path: Path) -> None:
        moment = datetime(2026, 1, 31, tzinfo=UTC)
        files = [
            table(tmp_path / "a.parquet", q=["a"] * 1500, at=[moment] * 1500, raw=[b"\0"] * 1500),
            table(tmp_path / "b.parquet", q=["b"] * 30, score=pa.array([0.5] * 30, pa.float32())),
        ]
        check_columns(files)
        inputs = Inputs(files, "q")
        rows = output(inputs, tmp_path / "out", "parquet")
        assert [row["output"] for row in rows] == ["A"] * 1500 + ["B"] * 30
        assert rows[0]["at"] == moment
        schema = parquet.read_schema(tmp_path / "out" / "output.parquet")
        assert schema.field("score").type == pa.float32()
        assert schema.names == ["q", "at", "raw", "score", *COLUMNS["generate"]]
        lines = output(inputs, tmp_path / "lines")
        assert (lines[0]["at"], lines[0]["raw"], lines[-1]["score"]) == (moment.isoformat(), "AA==", 0.5)

    def test_columns_that_cannot_stand_together_are_refused(self, tmp_path: Path) -> None:
        files = [
            table(tmp_path / "a.parquet", q=["a"], id=[1]),
            table(tmp_path / "b.parquet", q=["b"], id=["x"]),
        ]
        with pytest.raises(UserError, match="do not fit together"):
            check_columns(files)

    def test_what_has_no_common_type_becomes_json(self, tmp_path: Path) -> None:
        rows: list[dict[str, Any]] = [
            {
                "q": "a",
                "mixed": 1,
                "number": 1,
                "large": 2**60 + 1,
                "empty": {},
                "odd": "\ud800",
                "nothing": None,
            },
            {"q": "b", "mixed": "x", "number": 0.5, "large": 0.5, "empty": {}, "odd": "fine"},
        ]
        inputs = Inputs([lines(tmp_path / "a.jsonl", rows)], "q")
        first, second = output(inputs, tmp_path / "out", "parquet")
        assert (first["mixed"], second["mixed"]) == ("1", '"x"')
        assert (first["number"], second["number"]) == (1.0, 0.5)
        assert json.loads(first["large"]) == 2**60 + 1
        assert first["empty"] == "{}"
        assert json.loads(first["odd"]) == "\ud800"
        assert (first["nothing"], second["nothing"]) == (None, None)

    def test_lines_are_always_valid_json(self, tmp_path: Path) -> None:
        file = lines(tmp_path / "a.jsonl", ['{"q": "a", "n": NaN}', {"q": "b", "odd": "\ud800"}, {"q": "ß"}])
        output(Inputs([file], "q"), tmp_path / "out")
        text = (tmp_path / "out" / "output.jsonl").read_text(encoding="utf-8").splitlines()

        def refuse(name: str) -> None:
            pytest.fail(name)

        assert [json.loads(line, parse_constant=refuse)["q"] for line in text] == ["a", "b", "ß"]
        assert "ß" in text[2]

    def test_vectors_are_kept(self, tmp_path: Path) -> None:
        inputs = Inputs([lines(tmp_path / "a.jsonl", [{"q": "a"}, {"q": "b"}])], "q")
        parts = Parts(tmp_path / "parts", "embed", inputs.survey(), MODEL)
        for number in range(2):
            usage = {"prompt_tokens": 2, "total_tokens": 2}
            parts.keep(number, [{"embedding": [number, 0.25], "usage": usage}])
        target = tmp_path / "output.jsonl"
        write_output(inputs, parts, target, "jsonl")
        rows = [json.loads(line) for line in target.read_text().splitlines()]
        usage = {"prompt_tokens": 2, "total_tokens": 2}
        assert rows == [
            {"q": "a", "embedding": [0.0, 0.25], "usage": usage},
            {"q": "b", "embedding": [1.0, 0.25], "usage": usage},
        ]
