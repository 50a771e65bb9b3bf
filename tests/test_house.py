"""Rules that hold for all modules at once."""

from __future__ import annotations

import ast
import importlib
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "share_compute": ROOT / "platform" / "share_compute",
    "share_compute_actors": ROOT / "actors" / "share_compute_actors",
    "share_compute_api": ROOT / "api" / "share_compute_api",
}
MODULES = sorted(chain.from_iterable(folder.rglob("*.py") for folder in PACKAGES.values()))
SOURCES = [
    *MODULES,
    *sorted((ROOT / "benchmarks").rglob("*.py")),
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "web").glob("*.py")),
]
"""All modules, tests and programs, whose prose readers see."""
PUBLIC_PACKAGES = ["share_compute", "share_compute.data"]
MAX_LINES = 600
MOST_FILES = 20
"""In one folder; migrations are a list that only grows."""
SAME_NAMES: dict[str, str] = {}
"""Reason why a name has more than one public class. Give a class a name of its own instead of adding to this list."""
OTHERS_PRIVATE_NAMES = {
    "tests/actors/transport/gloo_links.py": "torch has no public name for the options of a gloo group",
    "tests/platform/compression/test_low_rank.py": "the rule of torch's own hook is the reference",
}
"""Reason why a test uses private names of another project. Give our own code a public seam instead."""
_SUBJECTLESS = r"(?:Who|Whoever|Whom|Whose|What|So long|Of|For so long|How long|How it is that|Those)\b"
REFUSED = re.compile(rf"{_SUBJECTLESS}(?![^.]*\?)")
"""Beginnings of sentences that hide the subject from the reader. Questions may begin so."""
SUSPECT = re.compile(rf"""(?:^|["'.!?])[\s#:]*{_SUBJECTLESS}""", re.MULTILINE)
"""Matches every file in which `REFUSED` can match a sentence; searching is faster than parsing."""


def shown(file: Path) -> str:
    return str(file.relative_to(ROOT))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", ["platform", "actors", "api"])
def test_root_folders_are_no_packages(folder: str) -> None:
    """A package named platform would hide the standard library's."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_the_standard_library_keeps_its_platform() -> None:
    module = importlib.import_module("platform")
    assert hasattr(module, "python_implementation")
    assert ROOT not in Path(str(module.__file__)).parents


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (PACKAGES[package] / "py.typed").is_file()


def test_kinds_of_devices_are_asked_in_one_place() -> None:
    """Other modules ask `KINDS` and `OPERATIONS`, so that a new kind of device needs no change in them."""
    seam = {"platform/share_compute/models/devices.py"}
    names_of_owners = {"api/share_compute_api/agent/devices.py"}
    found = set()
    for file in MODULES:
        if "cuda" not in (text := file.read_text(encoding="utf-8")) and "mps" not in text:
            continue
        for node in ast.walk(parsed(file)):
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            if any(isinstance(one, ast.Constant) and one.value in ("cuda", "mps") for one in compared):
                found.add(shown(file))
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.cuda", "torch.mps"):
                found.add(shown(file))
    assert found - names_of_owners == seam


def test_modules_are_small() -> None:
    num_lines = {shown(file): len(file.read_text(encoding="utf-8").splitlines()) for file in MODULES}
    assert {name: count for name, count in num_lines.items() if count > MAX_LINES} == {}


def test_modules_say_what_they_are_for() -> None:
    modules = [file for file in MODULES if "migrations" not in file.parts]
    assert [shown(file) for file in modules if not ast.get_docstring(parsed(file))] == []


def test_a_folder_has_few_files() -> None:
    tests = (ROOT / "tests").rglob("*.py")
    num_files = Counter(file.parent for file in (*MODULES, *tests) if "migrations" not in file.parts)
    assert {shown(folder): count for folder, count in num_files.items() if count > MOST_FILES} == {}


def test_a_folder_of_the_dashboard_has_few_files() -> None:
    num_files = Counter(path.parent for path in (ROOT / "web" / "src").rglob("*") if path.is_file())
    assert {shown(folder): count for folder, count in num_files.items() if count > MOST_FILES} == {}


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module, each with its line."""
    for node in ast.walk(parsed(file)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, " ".join(text.split())
    comment, begin = "", 0
    with tokenize.open(file) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type == tokenize.COMMENT:
                comment, begin = f"{comment} {token.string.lstrip('#: ')}".strip(), begin or token.start[0]
            elif token.type != tokenize.NL and comment:
                yield begin, comment
                comment, begin = "", 0


def test_sentences_begin_with_their_subject() -> None:
    odd = [
        f"{shown(file)}:{line}: {sentence}"
        for file in SOURCES
        if SUSPECT.search(file.read_text(encoding="utf-8"))
        for line, text in prose(file)
        for sentence in re.split(r"(?<=[.!?]) +", text)
        if REFUSED.match(sentence)
    ]
    assert odd == []


def private_names(file: Path) -> Iterator[str]:
    """Yield the private names that a test imports or replaces; ruff's SLF001 finds those that it reads."""
    for node in ast.walk(parsed(file)):
        found: list[str] = []
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("share_compute"):
                found = [each.name for each in names]
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "delattr" | "patch" | "object"), args=arguments
            ):
                values = (each.value for each in arguments[:2] if isinstance(each, ast.Constant))
                found = [value.rpartition(".")[2] for value in values if isinstance(value, str)]
        yield from (f"{shown(file)}:{node.lineno}: {name}" for name in found if re.match("_[^_]", name))


def test_tests_use_no_private_names() -> None:
    """Tests of private names fail when the code is rearranged, and pass when its behaviour breaks."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert [name for file in tests for name in private_names(file)] == []
    exempted = [
        file
        for file in tests
        if file != Path(__file__) and "noqa: SLF001" in file.read_text(encoding="utf-8")
    ]
    assert [shown(file) for file in exempted] == sorted(OTHERS_PRIVATE_NAMES)


def test_every_folder_of_modules_is_a_package() -> None:
    """Without an __init__.py a folder is left out by mypy and import-linter without a word."""
    folders = sorted({file.parent for file in MODULES if "versions" not in file.parts})
    assert [shown(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("name", PUBLIC_PACKAGES)
def test_exported_names_exist_and_are_sorted(name: str) -> None:
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__)
    assert all(hasattr(module, exported) for exported in module.__all__)


@pytest.mark.parametrize(
    "file", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))], ids=shown
)
def test_links_between_documents_lead_somewhere(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    targets = [part.partition(")")[0].partition("#")[0] for part in text.split("](")[1:]]
    missing = [
        target for target in targets if target and "://" not in target and not (file.parent / target).exists()
    ]
    assert missing == []


def test_percent_signs_follow_their_numbers() -> None:
    """Texts say 95%, not 95 %, in English and in Chinese."""
    spaced = re.compile(r"[0-9}] %(?= of\b|[^\w (]|$)", re.MULTILINE)
    web = ROOT / "web" / "src"
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *web.rglob("*.ts"), *web.rglob("*.tsx")]
    files += [*web.rglob("*.json"), PACKAGES["share_compute"] / "translations" / "zh.json", *MODULES]
    assert [shown(file) for file in files if spaced.search(file.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=shown)
def test_examples_say_how_to_run_them(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert f"share-compute submit examples/{file.name}" in text
    document = yaml.safe_load(text)
    files = document.get("job", document)["data"].get("files", [])  # a sweep has a job
    assert not any(Path(name).is_absolute() for name in files)


def test_nothing_that_machines_do_together_depends_on_their_clocks() -> None:
    """Owners' clocks are wrong. Only the store, which is on one machine, knows what time it is."""
    names = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
    calls = [
        f"{shown(file)}:{node.lineno}: {called}"
        for file in MODULES
        if "share_compute_api" not in file.parts and file.name != "store.py"
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in names
    ]
    assert calls == []


def test_wheels_have_no_code_of_tests() -> None:
    files = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"{package}/py.typed" for package in PACKAGES} <= files
    assert [file for file in sorted(files) if "testing" in file] == []


def test_public_classes_have_names_of_their_own() -> None:
    """A name that says which class it is needs no alias at an import, and is found by a search."""
    modules: dict[str, list[str]] = {}
    for file in MODULES:
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(f"{shown(file)}:{node.lineno}")
    shared = {name: places for name, places in modules.items() if len(places) > 1}
    assert {name: places for name, places in shared.items() if name not in SAME_NAMES} == {}
    assert sorted(SAME_NAMES.keys() - shared.keys()) == [], "these names are no longer shared: remove them"
