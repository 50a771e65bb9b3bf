"""Pages name only commands, flags, routes, fields and files that exist."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import typer
import yaml
from tests.docs.pages import ROOT, Block, Command, blocks, commands, in_shell, routes, spans, split
from typer.core import TyperGroup

from share_compute.files.topology_file import read_topology
from share_compute.specification import parse_submission
from share_compute.specification.placement.pinned_plan import read_plan
from share_compute_api.catalogue.operator_file import OperatorFile
from share_compute_api.cli import make_app

SHELL = [block for block in blocks() if in_shell(block)]
CLI = typer.main.get_command(make_app())
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer exports only this subclass
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
DRAWINGS = {("README.md", "submitter"), ("docs/planning.md", "big-llama:")}
"""Blocks without a language that show no commands, by their first word."""
CONFIGURATIONS = {"nginx", "caddyfile"}
"""Languages of blocks that tests/security/test_proxies.py runs as they are."""
EXTERNAL = {
    ".": "the shell's own command",
    "cd": "the shell's own command",
    "export": "the shell's own command",
    "git": "the clone of this repository; tests run in one",
    "curl": "its routes are checked below",
}


def own(words: tuple[str, ...]) -> None:
    """Parse a command of share-compute as the command line does, without running it."""
    command, rest = CLI, list(words)
    while isinstance(command, TyperGroup) and rest and rest[0] in command.commands:
        command = command.commands[rest.pop(0)]
    if command is CLI and rest and rest[0] in {"--help", "--install-completion"}:
        return
    is_word = bool(rest) and not rest[0].startswith("-")
    assert not (isinstance(command, TyperGroup) and is_word), f"there is no command {rest[0]}"
    command.make_context(command.name, rest, parent=CLI.context_class(CLI, info_name="share-compute"))


def check(command: Command, *, whole: bool) -> None:
    """Check that a command and its flags exist; ``whole`` commands have all their arguments, too."""
    program, *rest = command.words
    match program:
        case "share-compute":
            try:
                own(tuple(rest))
            except UsageError as error:
                if whole or type(error).__name__ not in {"MissingParameter", "BadOptionUsage"}:
                    raise
        case "make":
            targets = [word for word in rest if "=" not in word]
            assert targets
            assert [one for one in targets if not re.search(rf"^{re.escape(one)}:", MAKEFILE, re.M)] == []
        case "docker":
            docker(rest)
        case "python" | ".venv/bin/python":
            assert (ROOT / rest[0 if rest[0] != "-m" else 2]).exists()
        case "ufw":
            assert rest[:2] == ["allow", "proto"]
        case _:
            assert program in EXTERNAL, f"{command}: no test knows how to check this program"


def docker(words: list[str]) -> None:
    """Check that a command of docker compose names files, services and commands that exist."""
    assert words[0] == "compose"
    files = [words[index + 1] for index, word in enumerate(words) if word == "-f"] or ["docker-compose.yml"]
    services: set[str] = set()
    for file in files:
        services |= set(yaml.load((ROOT / file).read_text(), Loader=Tolerant)["services"])
    rest = [word for word in words[1:] if word not in {"-f", *files}]
    assert rest[0] in {"up", "exec", "stop", "down", "build"}
    if rest[0] in {"exec", "stop"}:
        assert rest[1] in services
    if rest[0] == "exec":
        assert rest[2] == "share-compute"
        own(tuple(rest[3:]))
    scaled = [word.partition("=")[0] for word in rest if re.match(r"\w+=\d+$", word)]
    assert set(scaled) <= services
    arguments = [word.partition("=")[0] for word in rest if re.match(r"[A-Z_]+=", word)]
    assert all(f"ARG {one}" in (ROOT / "Dockerfile").read_text() for one in arguments)


class Tolerant(yaml.SafeLoader):
    """Reads the tags of compose files (!reset, !override) as their values."""


Tolerant.add_multi_constructor("!", lambda _loader, _tag, node: node.value)


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_of_blocks_exist(block: Block) -> None:
    for command in commands(block):
        if command.words:
            check(command, whole=True)


def named() -> list[Command]:
    """Return the commands in sentences; `join --insecure` is one of share-compute, too."""
    assert isinstance(CLI, TyperGroup)
    found = list[Command]()
    for page, line, text in spans():
        first, _, more = text.partition(" ")
        if first in {"share-compute", "make", "python", ".venv/bin/python", "docker", "ufw", "curl"} and more:
            found += split(page, line, text)
        elif first in CLI.commands and re.match(r"-|[a-z]+( |$)", more):
            found += split(page, line, f"share-compute {text}")
    return found


@pytest.mark.parametrize("command", named(), ids=str)
def test_commands_in_sentences_exist(command: Command) -> None:
    check(command, whole=False)


def test_each_block_is_of_a_kind_that_is_checked() -> None:
    languages = {"sh", "python", "yaml", "json", *CONFIGURATIONS}
    unknown = [
        str(block)
        for block in blocks()
        if block.language not in languages
        and not in_shell(block)
        and (block.page, block.text.split(maxsplit=1)[0]) not in DRAWINGS
    ]
    assert unknown == []


def test_configurations_of_proxies_are_run() -> None:
    source = (ROOT / "tests" / "security" / "test_proxies.py").read_text(encoding="utf-8")
    for block in blocks():
        if block.language in CONFIGURATIONS:
            assert block.page == "docs/deployment.md"
            assert f'snippet("{block.language}")' in source


@pytest.mark.parametrize("block", [block for block in blocks() if block.language == "yaml"], ids=str)
def test_yaml_is_read_by_the_models(block: Block) -> None:
    document = yaml.safe_load(block.text)
    match document:
        case {"kind": "topology"}:
            assert read_topology(block.text).contributors
        case {"kind": "plan"}:
            assert read_plan(block.text)
        case {"replicas": dict()}:
            parse_submission(f"kind: serve\nname: poet\nmodel: {{ path: ./poet }}\n{block.text}")
        case {"models": list()}:
            assert OperatorFile.model_validate(document).models
        case {"scrape_configs": [{"job_name": _, "authorization": _, "static_configs": _}]}:
            pass  # a configuration of Prometheus
        case _:
            parse_submission(block.text)


@pytest.mark.parametrize("block", [block for block in blocks() if block.language == "json"], ids=str)
def test_json_has_fields_of_the_api(block: Block) -> None:
    document = json.loads(block.text)
    schema = "Problem" if "code" in document else "PlanRequest"
    assert set(document) <= set(openapi()["components"]["schemas"][schema]["properties"])


@pytest.mark.parametrize("block", [block for block in blocks() if block.language == "python"], ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


def openapi() -> dict[str, Any]:
    """Return the committed document, which tests/web/test_openapi.py compares with the server."""
    document: dict[str, Any] = json.loads((ROOT / "web" / "openapi.json").read_text(encoding="utf-8"))
    return document


def pattern(path: str) -> str:
    """Return a path with one form for all its parameters: {id}, ID, and ids of the examples."""
    path = re.sub(r"\{[^}]*\}|\b(ID|JOB|PATH)\b", "{}", path)
    return re.sub(r"\bjob-[a-z2-7]{8}\b", "{}", path).rstrip("/")


def test_routes_exist() -> None:
    known = {pattern(path): set(methods) for path, methods in openapi()["paths"].items()}
    known |= {"/api/v1/openapi.json": {"get"}, "/metrics": {"get"}}  # outside the document
    wrong = [
        f"{page}:{line}: {method} {path}"
        for page, line, method, path in routes()
        if pattern(path) not in known or (method and method.lower() not in known[pattern(path)])
    ]
    assert wrong == []


def test_a_wrong_command_is_found() -> None:
    for text in ("share-compute plam job.yaml", "share-compute keys make ann", "share-compute up --hots x"):
        with pytest.raises((AssertionError, UsageError)):
            check(Command("page", 1, (), tuple(shlex.split(text))), whole=True)
    with pytest.raises(AssertionError):
        check(Command("page", 1, (), ("make", "coffee")), whole=True)
    with pytest.raises(AssertionError, match="no test knows"):
        check(Command("page", 1, (), ("kubectl", "apply")), whole=True)
