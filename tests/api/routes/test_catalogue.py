"""The catalogue of models: its sources, what each key sees, the operator's file, and folders that are hostile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.api.conftest import Plane, wait_until
from tests.api.speaking import make_tokenizer
from typer.testing import Result

from share_compute.errors import UserError
from share_compute.lifecycle.attempt_events import ArtifactSaved
from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.specification import parse_job
from share_compute.store import ApiKeyRecord
from share_compute_api.client.client import Client
from share_compute_api.schemas.catalogue import CatalogueEntry, CatalogueView

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 304,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
CARD = "---\nlicense: apache-2.0\n---\n# A model\n"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tokenizer(tmp_path_factory.mktemp("whole"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "README.md").write_text(CARD)
    save_file({"a": np.zeros((4, 5), np.float32), "b": np.zeros(3, np.float16)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "roots").mkdir()
    return Settings(data_folder=tmp_path / "data", database_url=None, data_roots=(tmp_path / "roots",))


@pytest.fixture
def place(whole: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copy the model to a folder in the data root."""
    return lambda name: Path(shutil.copytree(whole, tmp_path / "roots" / name))


def settled(client: Client) -> CatalogueView:
    """Return the catalogue when all folders are read."""
    found: list[CatalogueView] = []

    def is_read() -> bool:
        found.append(client.models())
        return not any(entry.is_pending for entry in found[-1].models)

    wait_until(is_read)
    return found[-1]


def by_name(client: Client) -> dict[str, CatalogueEntry]:
    return {entry.name: entry for entry in settled(client).models}


def key(plane: Plane, name: str, *scopes: Scope) -> tuple[ApiKeyRecord, str]:
    return plane.store.keys.create(name, list(scopes))


def upload(plane: Plane, owner: ApiKeyRecord, folder: Path, name: str) -> str:
    uploads = plane.app.state.context.uploads
    made = uploads.create(name, "model", owner)
    for file in folder.iterdir():
        arrival = uploads.receive(made.id, file.name, owner)
        arrival.write(file.read_bytes())
        arrival.finish(None)
        arrival.close()
    return str(uploads.complete(made.id, owner).id)


def result(plane: Plane, owner: ApiKeyRecord, whole: Path) -> str:
    """Add a training job with a result."""
    spec = {"name": "mine", "model": {"config": CONFIG}, "data": {"files": ["/texts/a.txt"]}}
    job = plane.store.jobs.create(parse_job(spec), owner=owner.id)
    folder = plane.settings.data_folder / "jobs" / job.id / "artifacts" / "model"
    shutil.copytree(whole, folder)
    plane.store.jobs.begin(job.id, [])
    plane.store.progress.record(job.id, 1, [ArtifactSaved(name="model", path=folder, size_bytes=1)])
    return job.id


def test_a_folder_is_listed_with_the_facts_that_its_files_state(
    client: Client, place: Callable[[str], Path]
) -> None:
    folder = place("nested/tiny")
    entry = by_name(client)["tiny"]
    assert (entry.source, entry.model.path, entry.reference) == ("folder", folder, str(folder))
    assert entry.facts is not None
    assert entry.facts.architecture == "LlamaForCausalLM"
    assert (entry.facts.parameters, entry.facts.window_tokens, entry.facts.kind) == (23, 128, "generate")
    assert entry.facts.weights_bytes == (folder / "model.safetensors").stat().st_size
    assert entry.facts.has_chat_template
    assert entry.licence == "apache-2.0"
    assert client.deploy({"name": "tiny", "model": entry.model.model_dump(mode="json")}).name == "tiny"
    # A folder is read again when it changes.
    (folder / "README.md").write_text(CARD.replace("apache-2.0", "mit"))
    assert by_name(client)["tiny"].licence == "mit"


def test_each_key_sees_its_own_uploads_and_results(plane: Plane, whole: Path) -> None:
    ada, ada_key = key(plane, "ada", Scope.submit)
    _, bob_key = key(plane, "bob", Scope.submit)
    _, reader_key = key(plane, "reader", Scope.read)
    sent = upload(plane, ada, whole, "mail")
    fetched = upload(plane, ada, whole, f"org/tiny@{40 * 'a'}")
    job = result(plane, ada, whole)
    with Client(plane.url, ada_key) as client:
        found = {entry.id: entry for entry in settled(client).models}
    assert {one: entry.source for one, entry in found.items()} == {
        f"upload:{sent}": "upload",
        f"upload:{fetched}": "hub",
        f"job:{job}/model": "job",
    }
    assert found[f"upload:{fetched}"].name == "org/tiny"
    assert found[f"job:{job}/model"].facts is not None
    with Client(plane.url, bob_key) as client:
        assert settled(client).models == []
    with Client(plane.url, plane.api_key) as client:
        assert {entry.id for entry in settled(client).models} == set(found)
    answer = httpx.get(f"{plane.url}/api/v1/catalogue", headers={"Authorization": f"Bearer {reader_key}"})
    assert (answer.status_code, answer.json()["code"]) == (403, "missing-scope")


def test_the_operator_names_models(
    plane: Plane, client: Client, place: Callable[[str], Path], whole: Path
) -> None:
    ada, ada_key = key(plane, "ada", Scope.submit)
    folder, job = place("tiny"), result(plane, ada, whole)
    _, bob_key = key(plane, "bob", Scope.submit)
    (plane.settings.data_folder / "catalogue.yaml").write_text(
        f"""
models:
  - {{name: Poet, model: {{path: {folder}}}, description: Writes verse., licence: mit}}
  - {{name: Far, model: {{hub: org/far}}}}
  - {{name: Ours, model: {{job: {job}}}}}
  - {{name: Secret, model: {{path: /etc}}}}
"""
    )
    with Client(plane.url, bob_key) as bob:
        found = settled(bob)
    assert [(entry.name, entry.source) for entry in found.models] == [
        ("Poet", "operator"), ("Far", "operator")
    ]  # fmt: skip
    poet, far = found.models
    assert (poet.description, poet.licence, poet.facts is not None) == ("Writes verse.", "mit", True)
    assert (far.facts, far.reference, far.is_pending, far.problem) == (None, None, False, None)
    assert found.notes == []
    with Client(plane.url, ada_key) as owner:
        assert "Ours" in by_name(owner)
    # Admins see the reason why an entry is not listed.
    (note,) = settled(client).notes
    assert "catalogue.yaml: Secret: model.path: /etc is not below a folder that jobs may read" in note


def test_two_entries_for_one_folder_are_noted(
    plane: Plane, client: Client, place: Callable[[str], Path]
) -> None:
    folder = place("tiny")
    (plane.settings.data_folder / "catalogue.yaml").write_text(
        f"models: [{{name: One, model: {{path: {folder}}}}}, {{name: Two, model: {{path: {folder}}}}}]"
    )
    found = settled(client)
    assert [entry.name for entry in found.models] == ["One"]
    assert found.notes == ["catalogue.yaml: Two is not listed: One has the same folder; remove one"]
    _, bob_key = key(plane, "bob", Scope.submit)
    with Client(plane.url, bob_key) as bob:
        assert settled(bob).notes == []


def test_a_fetched_model_counts_for_its_own_commit_alone(plane: Plane, whole: Path) -> None:
    ada, ada_key = key(plane, "ada", Scope.submit)
    commit = 40 * "a"
    upload(plane, ada, whole, f"org/tiny@{commit}")
    (plane.settings.data_folder / "catalogue.yaml").write_text(
        f"""
models:
  - {{name: Exact, model: {{hub: org/tiny, revision: {commit}}}}}
  - {{name: Other, model: {{hub: org/tiny, revision: {40 * "b"}}}}}
  - {{name: Branch, model: {{hub: org/tiny, revision: main}}}}
  - {{name: Newest, model: {{hub: org/tiny}}}}
"""
    )
    with Client(plane.url, ada_key) as client:
        found = by_name(client)
    assert {name: entry.facts is not None for name, entry in found.items()} == {
        "Exact": True, "Other": False, "Branch": False, "Newest": False
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models:\n  - name: a\n   model: x", "is not valid YAML at line 3"),
        ("models: &all\n  - *all", "line 2, column 5: aliases"),
        (
            "models:\n  - name: a\n    model: {hub: a/b}\n  - name: b\n    model: {hub: a/b}\n    licens: mit",
            "line 6: models.1.licens: unknown key 'licens'; did you mean 'licence'?",
        ),
        ("models:\n- {name: a}", "line 2: models.0.model: is missing"),
        (
            "models:\n- name: a\n  model:\n    hub: ../b",
            "line 4: models.0.model.hub: must name a model on the Hub",
        ),
        ("models:\n- {name: a, model: {hub: a/b}}\n- {name: a, model: {hub: a/c}}", "two have the name 'a'"),
        ("models: many", "line 1: models: must be a list, not 'many'"),
        ("x" * (300 << 10), "at most 256 KiB are read"),
        ("\0", "is not text"),
    ],
    ids=["indentation", "alias", "key", "missing", "pattern", "twice", "list", "long", "binary"],
)
def test_a_wrong_file_of_the_operator_is_explained_with_line_and_field(
    plane: Plane, client: Client, text: str, problem: str
) -> None:
    (plane.settings.data_folder / "catalogue.yaml").write_text(text)
    found = settled(client)
    assert found.models == []
    (note,) = found.notes
    assert "catalogue.yaml" in note
    assert problem in note


def sparse(file: Path, size_bytes: int) -> None:
    with file.open("wb") as opened:
        opened.truncate(size_bytes)


def with_header(folder: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


HOSTILE: dict[str, tuple[Change, str]] = {
    "huge config": (lambda f: sparse(f / "config.json", 4 << 30), "config.json has 4.0 GiB; at most 1.0 MiB"),
    "deep config": (lambda f: (f / "config.json").write_text("[" * 500_000), "config.json cannot be read"),
    "huge settings": (
        lambda f: sparse(f / "modules.json", 4 << 30),
        "modules.json has 4.0 GiB; at most 1.0 MiB are read",
    ),
    "foreign step": (
        lambda f: (f / "modules.json").write_text('[{"type": "a.Pooling", "path": "/etc"}]'),
        "the folder of step 0 in modules.json is outside the model's folder",
    ),
    "huge index": (
        lambda f: sparse(f / "model.safetensors.index.json", 4 << 30),
        "at most 16.0 MiB are read",
    ),
    "endless header": (
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 8),
        "the headers of the weights have more than 16.0 MiB",
    ),
    "huge shape": (
        lambda f: with_header(f, {"a": {"shape": [10**9] * 9, "data_offsets": [0, 0]}}),
        "model.safetensors is damaged",
    ),
    "index elsewhere": (
        lambda f: (f / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "../../secret.safetensors"}})
        ),
        "names files of other folders",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "the folder has no tokenizer"),
}


def test_hostile_folders_get_a_reason_and_harm_no_other(client: Client, place: Callable[[str], Path]) -> None:
    for name, (change, _) in HOSTILE.items():
        change(place(name))
    place("good")
    found = by_name(client)
    for name, (_, problem) in HOSTILE.items():
        assert problem in (found[name].problem or "")
        assert found[name].facts is None
        deployment = {"name": "hostile", "model": found[name].model.model_dump(mode="json")}
        if name == "foreign step":
            with pytest.raises(UserError, match=r"model\.path: .* is outside the model's folder"):
                client.deploy(deployment)
    assert found["good"].problem is None
    assert found["good"].facts is not None


def test_links_out_of_the_roots_are_not_followed(
    client: Client, place: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    folder = place("linked")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(whole / "config.json")
    (tmp_path / "roots" / "elsewhere").symlink_to(whole)
    (tmp_path / "roots" / "again").symlink_to(tmp_path / "roots")
    found = by_name(client)
    assert set(found) == {"linked"}
    assert found["linked"].facts is None
    assert "is not below a folder that jobs may read" in (found["linked"].problem or "")


@pytest.mark.parametrize("target", ["/etc/hostname", "/absent/file"])
@pytest.mark.parametrize("place", ["config.json", "README.md", "1_Pooling/config.json"])
def test_a_result_with_links_is_not_read(
    plane: Plane, client: Client, whole: Path, place: str, target: str
) -> None:
    ada, _ = key(plane, "ada", Scope.submit)
    job = result(plane, ada, whole)
    file = plane.settings.data_folder / "jobs" / job / "artifacts" / "model" / place
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    file.symlink_to(target)
    (entry,) = settled(client).models
    assert (entry.facts, entry.problem) == (None, "the result has links")


def test_a_result_outside_its_jobs_folder_is_not_listed(
    plane: Plane, client: Client, whole: Path, tmp_path: Path
) -> None:
    ada, _ = key(plane, "ada", Scope.submit)
    jobs = {name: result(plane, ada, whole) for name in ("there", "absent", "linked", "nul")}
    folder = plane.settings.data_folder / "jobs" / jobs["linked"] / "artifacts" / "model"
    shutil.rmtree(folder)
    folder.symlink_to(whole)
    places = {"there": whole, "absent": tmp_path / "absent", "nul": Path("/a\0b")}
    for name, place in places.items():
        saved = ArtifactSaved(name="model", path=place, size_bytes=1)
        plane.store.progress.record(jobs[name], 1, [saved])
    entries = (f"{{name: {name}, model: {{job: {job}}}}}" for name, job in jobs.items())
    (plane.settings.data_folder / "catalogue.yaml").write_text(f"models: [{', '.join(entries)}]")
    found = settled(client)
    assert found.models == []
    assert len(found.notes) == 4
    for note, (name, job) in zip(found.notes, jobs.items(), strict=True):
        assert note.endswith(f"{name}: model.job: {job} has no model that this key may serve")


def test_newer_results_that_cannot_be_served_hide_no_model(plane: Plane, client: Client, whole: Path) -> None:
    ada, _ = key(plane, "ada", Scope.submit)
    job = result(plane, ada, whole)
    other = result(plane, ada, whole)
    saved = [ArtifactSaved(name=f"{number:03}", path=whole, size_bytes=1) for number in range(201)]
    plane.store.progress.record(other, 1, saved)
    found = settled(client)
    assert {entry.id for entry in found.models} == {f"job:{job}/model", f"job:{other}/model"}
    assert found.notes == []


def test_two_hundred_models_are_listed(client: Client, place: Callable[[str], Path], tmp_path: Path) -> None:
    first = place("m000")
    for number in range(1, 203):
        shutil.copytree(first, tmp_path / "roots" / f"m{number:03}", copy_function=shutil.copy)
    found = settled(client)
    assert len(found.models) == 200
    assert all(entry.facts is not None for entry in found.models)
    assert found.notes == ["the search of the data roots stopped after 200 models or 20,000 files"]


@pytest.mark.slow
def test_the_command_lists_models(
    plane: Plane, run: Callable[..., Result], place: Callable[[str], Path]
) -> None:
    assert "No model is here yet" in run("models").stdout
    folder = place("tiny")
    (place("bad") / "config.json").unlink()
    (folder.parent / "bad" / "config.json").write_text("{}")
    (plane.settings.data_folder / "catalogue.yaml").write_text("models: [{name: Far, model: {hub: org/far}}]")
    said = run("models").stdout
    assert "hub:org/far" in said
    assert str(folder) in said
    assert "bad cannot be served: config.json has no model_type" in said
    items = json.loads(run("models", "--json").stdout)["items"]
    assert [item["name"] for item in items] == ["Far", "bad", "tiny"]
