"""The job file: accepted values, helpful errors for the others; its schema, examples and guide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from share_compute.errors import UserError
from share_compute.files.plain_yaml import read_yaml, write_yaml
from share_compute.specification import (
    LAYER_TYPES,
    SCHEDULES,
    Kind,
    OptimizerName,
    TrainJob,
    job_schema,
    parse_any_job,
    parse_job,
)

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))

TEXT: dict[str, Any] = {"model": {"config": {"model_type": "llama"}}, "data": {"files": ["a.txt"]}}
DIGITS: dict[str, Any] = {"model": {"layers": [{"type": "relu"}]}, "data": {"dataset": "digits"}}

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def refusal(source: str | dict[str, Any]) -> UserError:
    with pytest.raises(UserError) as caught:
        parse_job(source)
    assert caught.value.hint
    return caught.value


def changed(path: str, value: Any, base: dict[str, Any] = TEXT) -> dict[str, Any]:
    """Return a copy of ``base`` with one field, named with dots, set."""
    job: dict[str, Any] = json.loads(json.dumps(base))
    *parents, last = path.split(".")
    place = job
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return job


class TestAccepted:
    @pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
    def test_every_example_parses(self, file: Path) -> None:
        job = parse_any_job(file.read_text(encoding="utf-8"))
        assert job.name == file.stem

    def test_there_are_examples(self) -> None:
        assert {"tiny-llama", "finetune", "digits", "two-machines-per-stage"} <= {
            file.stem for file in EXAMPLES
        }

    def test_yaml_json_and_mapping_are_the_same_job(self) -> None:
        job = parse_job(TEXT)
        assert parse_job(json.dumps(TEXT)) == job
        assert parse_job("model: {config: {model_type: llama}}\ndata: {files: [a.txt]}") == job

    @pytest.mark.parametrize("source", [TEXT, DIGITS], ids=["text", "digits"])
    def test_a_job_survives_json(self, source: dict[str, Any]) -> None:
        job = parse_job(source)
        assert TrainJob.model_validate_json(job.model_dump_json()) == job
        assert parse_job(job.model_dump(mode="json")) == job

    def test_numbers_that_yaml_reads_as_text_are_numbers(self) -> None:
        source = "model: {config: {model_type: llama}}\ndata: {files: [a.txt]}\n"
        job = parse_job(source + "training: {optimizer: {learning_rate: 1e-3}}")
        assert job.training.optimizer.learning_rate == 0.001

    @pytest.mark.parametrize("text", ["0100", "08", "1:30", "1e-5"])
    def test_text_that_looks_like_a_number_survives_yaml(self, text: str) -> None:
        assert read_yaml(write_yaml({"name": text}), "job file") == {"name": text}

    def test_microbatches_cut_the_batch(self) -> None:
        job = parse_job(changed("training", {"batch_size": 12, "microbatches": 3}))
        assert job.training.microbatch_size == 4


class TestRefused:
    @pytest.mark.parametrize(
        ("source", "line"),
        [
            ("model: [unclosed", 1),
            ("name: a\n\tmodel: b", 2),
            ("name: a\nname b: c: d", 2),
            ("name: 'never closed\n", 1),
        ],
    )
    def test_malformed_yaml_names_the_line(self, source: str, line: int) -> None:
        assert f"not valid YAML at line {line}, column" in refusal(source).message

    @pytest.mark.parametrize(
        "source",
        [
            "name: 2024-13-45",
            "[" * 5000,
            "name: !!binary gIE=",
            "name: !!int ''",
            'name: "\\ud800"',
            "seed: 0100",
            "name: 08",
        ],
    )
    def test_what_yaml_stumbles_over_is_a_user_error(self, source: str) -> None:
        assert "not valid YAML" in refusal(source).message

    def test_what_is_no_text_is_a_user_error(self) -> None:
        assert "the job file is not text" in refusal("name: \x00").message

    def test_an_empty_file_is_called_empty(self) -> None:
        assert refusal("").message == refusal("# nothing\n").message == "the job file is empty"

    @pytest.mark.parametrize("source", ["- a\n- b", "just words", "3"])
    def test_a_job_is_a_mapping(self, source: str) -> None:
        error = refusal(source)
        assert "a job is a mapping" in error.message
        assert "examples/" in str(error.hint)

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            ("kind", "trian", "unknown kind 'trian'; did you mean 'train'?"),
            ("trainin", {}, "unknown key 'trainin'; did you mean 'training'?"),
            (
                "training.batchsize",
                4,
                "training.batchsize: unknown key 'batchsize'; did you mean 'batch_size'?",
            ),
            ("training.zzz", 4, "known keys: steps, batch_size"),
            ("training.batch_size", 2**20 + 1, "training.batch_size"),
            ("training.microbatches", 10**18, "training.microbatches"),
            ("training.optimizer.name", "adamm", "unknown optimizer 'adamm'; did you mean 'adam'?"),
            ("training.optimizer.name", "zzz", "known: sgd, momentum, adagrad, rmsprop, adam, adamw"),
            ("training.schedule.name", "cosin", "unknown schedule 'cosin'; did you mean 'cosine'?"),
            ("training.precision", "fp16", "must be 'float32', 'bfloat16' or 'float16'"),
            ("training.optimizer.decays", "none", "must be 'matrices' or 'all'"),
            ("training.freeze", [""], "training.freeze: a pattern is empty"),
            ("training.lora", {"rank": 0}, "training.lora.rank: must be at least 1"),
            ("training.lora", {}, "training.lora adapts a pretrained model: give model.path"),
            ("training", {"lora": {}, "freeze": ["a"]}, "give lora or freeze, not both"),
            ("training.early_stopping", {}, "early_stopping needs validate_every"),
            (
                "training.samples",
                {"every": 5, "prompts": []},
                "training.samples.prompts: must have at least 1",
            ),
            ("training.samples", {"every": 5, "prompts": [""]}, "a prompt is empty"),
            (
                "training.schedule",
                {"name": "polynomial", "options": {"powr": 2}},
                "unknown option of schedule polynomial: 'powr'; did you mean 'power'?",
            ),
            (
                "training.schedule",
                {"name": "linear", "options": {"power": 2}},
                "option of schedule linear: 'power'",
            ),
            (
                "training.schedule.options",
                {"num_cycles": "two"},
                "num_cycles must be a number that is not negative",
            ),
            (
                "training.schedule.options",
                {"num_cycles": -1},
                "num_cycles must be a number that is not negative",
            ),
            (
                "training.schedule",
                {"name": "inverse_sqrt", "options": {"timescale": 2.5}},
                "timescale must be a whole number, at least 1, not 2.5",
            ),
            (
                "training.schedule",
                {"name": "cosine_with_min_lr"},
                "needs either option min_lr or option min_lr_rate",
            ),
            ("training.schedule", {"name": "warmup_stable_decay"}, "needs option num_decay_steps"),
            (
                "training.schedule",
                {"name": "warmup_stable_decay", "options": {"num_decay_steps": 9, "decay_type": "steep"}},
                "decay_type must be one of linear, cosine, 1-sqrt, not 'steep'",
            ),
            (
                "training.schedule",
                {"name": "warmup_stable_decay", "warmup_steps": 60, "options": {"num_decay_steps": 50}},
                "warmup_steps and num_decay_steps are 110 together, more than the 100 steps",
            ),
            (
                "training.schedule",
                {"name": "polynomial", "options": {"lr_end": 0.01}},
                "lr_end 0.01 must be below optimizer.learning_rate 0.001",
            ),
            ("training.steps", 0, "training.steps: must be at least 1"),
            ("training.steps", "many", "training.steps: must be a whole number, not 'many'"),
            ("training.optimizer.learning_rate", float("inf"), "must be a finite number"),
            ("training.optimizer.learning_rate", float("nan"), "must be a finite number"),
            ("training.optimizer.betas", [0.9, 1.0], "each beta must be at least 0 and less than 1"),
            ("training.optimizer.betas", [0.9], "training.optimizer.betas.1: is missing"),
            ("training.microbatches", 3, "batch_size 16 is not a multiple of microbatches 3"),
            ("training.seed", 2**63, "training.seed: must be at most"),
            ("training.max_gradient_norm", 0, "training.max_gradient_norm: must be more than 0"),
            ("training.communication_fusion.allreduce", {"mode": "size"}, "mode size needs bucket_bytes"),
            (
                "training.communication_fusion.allreduce",
                {"mode": "index", "bucket_bytes": 8},
                "mode size needs bucket_bytes",
            ),
            ("training.communication_fusion.allreduce", {"mode": "index"}, "mode index needs cuts"),
            (
                "training.communication_fusion.allreduce",
                {"mode": "index", "cuts": [3, 3]},
                "cuts must be at least 1 and ascending",
            ),
            ("training.communication_fusion.allreduce", {"mode": "size", "bucket_bytes": 0}, "at least 1"),
            (
                "training.communication_fusion.allgather",
                {"mode": "index", "bucket_bytes": 8},
                "mode size needs bucket_bytes",
            ),
            ("training.communication_fusion.gather", {"mode": "auto"}, "gather"),
            ("training.gradient_fusion", {"mode": "auto"}, "gradient_fusion"),
            ("data.files", [], "files is empty"),
            (
                "data.files",
                ["a.csv"],
                (
                    "cannot read a.csv as text; data.table reads tables, data.labels texts with labels; "
                    "known: .txt, .jsonl, .parquet"
                ),
            ),
            ("data.files", ["corpus"], "cannot read corpus, which has no suffix"),
            ("data.files", ["a.txt", "b.jsonl"], "files are of several kinds: .jsonl, .txt"),
            ("data.dataset", "digits", "give exactly one of files and dataset"),
            ("data.validation_fraction", 0.5, "data.validation_fraction: must be less than 0.5"),
            (
                "data",
                {"dataset": "digits"},
                (
                    "declared layers train on a dataset, tables, images or texts with data.labels, "
                    "language models on text files"
                ),
            ),
            ("model.path", "folder", "give exactly one of path, hub, config and layers; given: path, config"),
            ("model", {}, "given: none"),
            ("model.config", {"vocab_size": 3}, "config needs a model_type"),
            ("model", {"layers": []}, "layers is empty"),
            (
                "tokenizer.vocab_size",
                256,
                "tokenizer.vocab_size: must be at least 257",
            ),
            (
                "tokenizer",
                {"path": "t", "vocab_size": 512},
                "give path, or vocab_size to train one, not both",
            ),
            ("name", "", "name: "),
            ("name", "../escape", "name: "),
            ("parallelism.stages", 0, "parallelism.stages: must be at least 1"),
            (
                "parallelism.channel",
                "pigeon",
                "parallelism.channel: must be 'auto', 'direct' or 'ray'",
            ),
        ],
    )
    def test_the_field_and_the_hint_are_named(self, path: str, value: Any, message: str) -> None:
        assert message in refusal(changed(path, value)).message

    def test_training_fits_the_model_and_the_data(self) -> None:
        samples = changed("training.samples", {"every": 5, "prompts": ["a"]}, DIGITS)
        assert "a model for image_classification makes no text" in refusal(samples).message
        stopping = {"validate_every": 5, "early_stopping": {}}
        unseen = changed("data.validation_fraction", 0, changed("training", stopping))
        assert "needs samples to validate on" in refusal(unseen).message
        assert parse_job(changed("training", stopping)).training.early_stopping is not None

    def test_layers_name_their_place(self) -> None:
        error = refusal(changed("model.layers", [{"type": "relu"}, {"type": "linaer"}], DIGITS))
        assert "model.layers.1.type: unknown layer type 'linaer'; did you mean 'linear'?" in error.message
        error = refusal(changed("model.layers", [{"type": "conv2d", "options": {"padding": "same"}}], DIGITS))
        assert "padding must be a number, true, false or a list of whole numbers, not 'same'" in error.message

    def test_every_wrong_field_is_named_at_once(self) -> None:
        job = changed("training", {"steps": 0, "batchsize": 4, "optimizer": {"name": "adm", "rate": 1}})
        job["nmae"] = "x"
        fields = {item["field"] for item in refusal(job).details["fields"]}
        assert fields == {
            "training.steps",
            "training.batchsize",
            "training.optimizer.name",
            "training.optimizer.rate",
            "nmae",
        }

    @pytest.mark.parametrize(
        ("config", "why"),
        [
            ("2026-01-31", "date"),
            (".nan", "not JSON compliant"),
        ],
    )
    def test_a_configuration_is_plain_json(self, config: str, why: str) -> None:
        source = f"model: {{config: {{model_type: llama, note: {config}}}}}\ndata: {{files: [a.txt]}}"
        with pytest.raises(UserError, match=r"model\.config: must be plain JSON") as caught:
            parse_job(source)
        assert why in caught.value.message

    def test_a_file_cannot_grow_by_aliases(self) -> None:
        bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"{this}: &{this} [{', '.join([f'*{before}'] * 9)}]\n" for before, this in pairwise("abcdefghi")
        )
        with pytest.raises(UserError, match=r"line 2, column 8: aliases .* are not read"):
            parse_job(bomb)

    def test_a_key_that_is_given_twice_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"line 3, column 1: 'name' is given twice"):
            parse_job("name: a\nkind: train\nname: b")

    def test_every_member_has_a_microbatch(self) -> None:
        with pytest.raises(UserError, match=r"members_per_stage 5 is more than training\.microbatches 4"):
            parse_job({**changed("parallelism", {"members_per_stage": 5}), "training": {"microbatches": 4}})

    @pytest.mark.parametrize(
        ("training", "message"),
        [
            ({"synchronization": {"kind": "gosip", "branches": 4}}, "unknown synchronization 'gosip'"),
            (
                {"synchronization": {"kind": "local", "branches": 1025}},
                "training.synchronization.branches: must be at most 1024",
            ),
            (
                {"synchronization": {"kind": "local", "branches": 2, "quorum": 3}},
                "quorum 3 is more than the 2 branches",
            ),
            (
                {"synchronization": {"kind": "elastic", "branches": 4, "rate": 0.5}},
                "training.synchronization: rate 0.5 times 4 branches is 2, more than 1: the centre would not settle",
            ),
            (
                {"synchronization": {"kind": "gossip", "branches": 1}},
                "training.synchronization.branches: must be at least 2",
            ),
            (
                {"synchronization": {"kind": "parameter_server", "branches": 2, "staleness": -1}},
                "training.synchronization.staleness: give a whole number from 0, or unbounded",
            ),
            (
                {"synchronization": {"kind": "parameter_server", "branches": 2, "staleness": True}},
                "training.synchronization.staleness: give a whole number from 0, or unbounded",
            ),
            (
                {
                    "synchronization": {
                        "kind": "parameter_server",
                        "branches": 2,
                        "quorum": 1,
                        "staleness": 1,
                    }
                },
                "quorum 1 needs staleness 0: with staleness 1, each push is merged alone",
            ),
            (
                {"steps": 20, "synchronization": {"kind": "local", "branches": 2}},
                "synchronization.every 30 is more than the 20 steps of the job",
            ),
            (
                {"synchronization": {"kind": "local", "branches": 2, "every": 7}, "validate_every": 10},
                "validate_every 10 is not a multiple of synchronization.every 7",
            ),
            (
                {"synchronization": {"kind": "local", "branches": 2, "every": 7}, "checkpoint_every": 13},
                "checkpoint_every 13 is not a multiple of synchronization.every 7",
            ),
            (
                {
                    "synchronization": {"kind": "local", "branches": 2, "every": 7},
                    "samples": {"every": 8, "prompts": ["Once"]},
                },
                "samples.every 8 is not a multiple of synchronization.every 7",
            ),
            (
                {
                    "synchronization": {"kind": "gossip", "branches": 2},
                    "validate_every": 10,
                    "early_stopping": {},
                },
                "early_stopping needs a synchronization with common weights",
            ),
            (
                {"compression": {"name": "int8"}},
                "compression.error_feedback 1 needs a synchronization with branches",
            ),
            (
                {"compression": {"name": "powersgd", "error_feedback": None}},
                "compression.name powersgd keeps state: it needs a synchronization with branches",
            ),
            (
                {"compression": {"name": "int8", "error_feedback": None, "from_step": 5}},
                "compression.from_step 5 needs a synchronization with branches",
            ),
            (
                {
                    "synchronization": {"kind": "local", "branches": 2},
                    "compression": {"name": "topk", "density": 0.0001},
                },
                "density 0.0001 keeps no value of a chunk of 4096; the least density is 0.000244141",
            ),
        ],
    )
    def test_rounds_that_cannot_be_are_refused(self, training: dict[str, Any], message: str) -> None:
        assert message in refusal(changed("training", training)).message

    def test_the_number_of_microbatches_may_be_left_to_the_planner(self) -> None:
        job = parse_job(changed("training", {"batch_size": 12}))
        assert job.training.microbatches is None
        settled = job.with_microbatches(3)
        assert settled.training.microbatch_size == 4
        assert settled.with_microbatches(12).training.microbatch_size == 1

    @pytest.mark.parametrize(
        ("parallelism", "machines"),
        [
            ({}, 1),
            ({"stages": 3}, 3),
            ({"members_per_stage": 2}, 2),
            ({"stages": 3, "members_per_stage": 2}, 6),
        ],
    )
    def test_it_knows_how_many_machines_it_needs(self, parallelism: dict[str, int], machines: int) -> None:
        assert parse_job(changed("parallelism", parallelism)).parallelism.machines_needed == machines

    @given(st.one_of(st.text(), st.dictionaries(st.text(), JSON), JSON.map(str)))
    def test_nothing_but_a_user_error_comes_of_nonsense(self, source: str | dict[str, Any]) -> None:
        refusal(source)

    @given(
        st.sampled_from(["name", "model", "data", "training", "training.optimizer", "tokenizer", "kind"]),
        JSON,
    )
    def test_any_value_in_any_place_is_taken_or_refused(self, path: str, value: Any) -> None:
        source = changed(path, value)
        try:
            job = parse_job(source)
        except UserError:
            refusal(source)
        else:
            assert parse_job(job.model_dump(mode="json")) == job


def schema_fields(
    schema: dict[str, Any], node: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name with dots, schema) of every field below a node, through references."""
    for name, field in node.get("properties", {}).items():
        yield prefix + name, field
        for target in re.findall(r"#/\$defs/(\w+)", json.dumps(field)):
            yield from schema_fields(schema, schema["$defs"][target], f"{prefix}{name}.")


def defaults(schema: dict[str, Any]) -> dict[str, str]:
    """Return the default of every field as the guide writes it.

    A field of several alternatives with different defaults has each default with the name of its alternative. The
    default of the field that chooses among alternatives is that of the whole part.
    """
    found: dict[str, dict[str, str]] = {}

    def walk(node: dict[str, Any], prefix: str, tag: str) -> None:
        for name, field in node.get("properties", {}).items():
            path, choice = prefix + name, field.get("discriminator", {})
            if "default" in field and "const" not in field:
                found.setdefault(path, {})[tag] = f"`{json.dumps(field['default'])}`"
            for value, target in choice.get("mapping", {}).items():
                walk(schema["$defs"][target.rpartition("/")[2]], f"{path}.", value)
            if choice and "default" in field:
                chosen = json.dumps(field["default"][choice["propertyName"]])
                found[f"{path}.{choice['propertyName']}"] = {"": f"`{chosen}`"}
            elif not choice:
                for target in re.findall(r"#/\$defs/(\w+)", json.dumps(field)):
                    walk(schema["$defs"][target], f"{path}.", tag)

    walk(schema, "", "")
    return {
        name: next(iter(by_tag.values()))
        if len(set(by_tag.values())) == 1
        else ", ".join(f"{value} ({tag})" for tag, value in by_tag.items())
        for name, by_tag in found.items()
    }


class TestSchema:
    def fields(self, kind: Kind = "train") -> dict[str, dict[str, Any]]:
        schema = job_schema(kind)
        return dict(schema_fields(schema, schema))

    def test_it_is_json_and_closed(self) -> None:
        schema = job_schema()
        json.dumps(schema)
        objects = [schema, *(one for one in schema["$defs"].values() if one.get("type") == "object")]
        assert all(one["additionalProperties"] is False for one in objects)

    @pytest.mark.parametrize("kind", get_args(Kind))
    def test_every_field_is_described(self, kind: Kind) -> None:
        # A part of a specification has the description of the model that it refers to.
        plain = {name: field for name, field in self.fields(kind).items() if "$ref" not in field}
        assert [name for name, field in plain.items() if not field.get("description")] == []

    def test_choices_are_listed_for_forms(self) -> None:
        fields, definitions = self.fields(), job_schema()["$defs"]
        assert fields["training.schedule.name"]["enum"] == list(SCHEDULES)
        assert fields["model.layers.type"]["enum"] == list(LAYER_TYPES)
        assert definitions["OptimizerName"]["enum"] == [name.value for name in OptimizerName]

    @pytest.mark.parametrize(("kind", "page"), [("train", "job-file.md"), ("sparse", "sparse.md")])
    def test_the_guide_has_every_field_with_its_default(self, kind: Kind, page: str) -> None:
        guide = (ROOT / "docs" / page).read_text(encoding="utf-8")
        rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", guide, flags=re.MULTILINE))
        fields = self.fields(kind)
        parts = {name.rpartition(".")[0] for name in fields} - {"", "model.layers"}
        assert set(rows) == set(fields) - parts
        shown = defaults(job_schema(kind))
        assert {name: rows[name] for name in shown if name not in parts} == {
            name: shown[name] for name in shown if name not in parts
        }


def test_numbers_without_a_dot_are_numbers() -> None:
    text = "model: {config: {model_type: llama, rms_norm_eps: 1e-5, name: 1e, hash: 12ab}}\ndata: {files: [a.txt]}\n"
    assert parse_job(text).model.config == {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "name": "1e",
        "hash": "12ab",
    }
