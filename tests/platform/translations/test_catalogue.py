"""The Chinese catalogue has an entry for each text that people see, and no other entries."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.platform.translations.templates import ROOT, found_templates, templates_of

from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.store.records import InviteState, LinkState
from share_compute.translations.translator import chinese

CATALOGUE: dict[str, str] = json.loads(
    (ROOT / "platform" / "share_compute" / "translations" / "zh.json").read_text(encoding="utf-8")
)
NOT_SHOWN = frozenset(
    {
        (
            "Exit codes: 0 done; 1 internal error; 2 wrong request or usage; 3 not found; 4 conflict with the present "
            "state; 5 key or invite refused; 6 the machines cannot hold the job; 7 a machine was lost; 8 something "
            "needed does not answer; 10 the followed job failed; 11 it was cancelled; 130 interrupted."
        ),
        "'out of memory'",
        "CUDA error: out of memory",
        "Extra inputs are not permitted",
        "Field required",
        "MPS backend out of memory",
        "Ray runtime started",
        "Version mismatch",
        "ddress already in use",
        "cannot map zero-fill",
        "does not have a deterministic implementation",
        "failed to map segment",
        "is already running at",
        "launch worker thread",
        "model card",
        "model name",
        "out of memory",
        "start new thread",
        "version mismatch",
        # Sentences of libraries, which are replaced.
        "did not find expected ',' or ']'",
        "did not find expected ',' or '}'",
        "found character that cannot start any token",
        "mapping values are not allowed in this context",
        "could not find expected ':'",
        "did not find expected key",
        "did not find expected '-' indicator",
        "did not find expected node content",
        "found unexpected end of stream",
        "found unexpected document indicator",
        "did not find expected <document start>",
        "found unknown escape character",
        "found a tab character that violates indentation",
        "Expecting value",
        "Expecting property name enclosed in double quotes",
        "Illegal trailing comma before end of object",
        "Illegal trailing comma before end of array",
        "Expecting ':' delimiter",
        "Expecting ',' delimiter",
        "Extra data",
        "Unterminated string starting at",
        "Invalid control character at",
        "Invalid \\escape",
        "Invalid \\uXXXX escape",
        "Unexpected UTF-8 BOM (decode using utf-8-sig)",
        "Missing command\\.",
        # Examples in schemas and tests.
        "Ada's scripts",
        "export SHARE_COMPUTE_URL=https://192.0.2.1:8700 SHARE_COMPUTE_API_KEY=sck_...",
        "SHARE_COMPUTE_INVITE=abcd-efgh-ijkl-mnop share-compute join https://192.0.2.1:8700",
        "a line of text\n",
        "laptops of Ada",
        "learning rates",
        "no warm-up",
        # Values, names of processes, help and descriptions.
        "{task.fields[name]}  {task.description}",
        "Used part of the lent CPU threads.",
        "Used part of all processors of the host.",
        "Memory that the processes of the cluster hold.",
        "Part of the time in which the lent GPU computed.",
        "Used memory of the lent GPU.",
        "Memory of the lent GPU.",
        "Highest temperature of the processors.",
        "Temperature of the lent GPU.",
        "Rate at which the network interface received.",
        "Rate at which the network interface sent.",
        "share-compute {}\n",
        " join ",
        "Events as they happen. Each has the event's number as `id` and its kind as `event`.",
        "allocate memory",
        "demo {}",
        "no {} on {}: {}\n",
        "schedule.name {}",
        "share-compute {} {}",
        "then.{} {}",
        "{} at {} tokens, not {} as {} says",
        # Headings, whose entries have bars.
        "Gradient sums",
        "KV cache",
        "Left out",
        "One step",
        "a sample",
        "a step",
        "of it caches",
        "x best",
        # Styles, and graphs in the language of Graphviz.
        " [label={}, color=blue]",
        "    label={}",
        "    {} [label={}, fillcolor={}]",
        "  node [shape=box, style=filled]",
        "  subgraph cluster_{} {",
        "bold {}",
        "digraph operators {",
        "reverse ",
        "{} h {} min",
        "{} min {} s",
        "all GPUs",
        "all GPUs, or the CPU",
        "a part of the CPU",
        "the CPU",
    }
)
"""Texts in the sources that people do not see, or that stay as they are."""
STATES = frozenset(
    {*ContributorState, *JobState, *DeploymentState, *InviteState, *LinkState}
    | {"submitted", "joined", "{} ago", "| in {} |", "| {} of {} |"}
)
"""States, which are single words, and other short texts."""
_CHINESE = re.compile("[\\u3400-\\u9fff]")
ELSEWHERE = frozenset({"{} character", "{} characters", "{} item", "{} items"})
"""Templates whose English comes from pydantic."""


def test_each_text_for_people_has_an_entry() -> None:
    missing = [
        f"{found.path}:{found.line}: {found.template!r}"
        for found in found_templates()
        if found.template not in CATALOGUE and found.template not in NOT_SHOWN
    ]
    assert missing == [], "translate these in platform/share_compute/translations/zh.json"


def test_each_entry_is_for_a_text_in_the_sources() -> None:
    known = (
        {found.template for found in found_templates()}
        | STATES
        | ELSEWHERE
        | set(map("| {} |".format, _headings()))
    )
    assert [template for template in CATALOGUE if template not in known] == []
    assert [template for template in NOT_SHOWN if template not in known] == []


def _headings() -> Iterator[str]:
    """Yield all texts in the sources of the terminal's output and of `doctor`; some of them are headings."""
    api = "api/share_compute_api"
    for folder in (f"{api}/cli", f"{api}/terminal", f"{api}/agent", "actors/share_compute_actors/machine"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_headings_of_tables_have_entries() -> None:
    missing = []
    for path in (ROOT / "api" / "share_compute_api" / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Assign(targets=[ast.Name("columns")], value=ast.Tuple(elts=names)):
                    pass
                case ast.Call(func=ast.Name("print_table"), args=[ast.Tuple(elts=names), *_]):
                    pass
                case _:
                    continue
            texts = [name.value for name in names if isinstance(name, ast.Constant)]
            missing += [text for text in texts if text and f"| {text} |" not in CATALOGUE]
    assert missing == []


def test_translations_use_each_value() -> None:
    wrong = []
    for template, translation in CATALOGUE.items():
        numbers = Counter(re.findall(r"\{(\d+)\}", translation))
        slots, plain = template.count("{}"), translation.count("{}")
        expected = Counter(str(place + 1) for place in range(slots))
        if not (plain == slots and not numbers) and not (plain == 0 and numbers == expected):
            wrong.append(template)
    assert wrong == []


def test_chinese_has_spaces_on_both_sides_of_values() -> None:
    """Names have spaces beside Chinese characters; the translator removes those beside Chinese values.

    A value that touches a word or another value in English may be empty, and needs no space.
    """
    touched = {
        f"{template} -> {translation}"
        for template, translation in CATALOGUE.items()
        for place, (before, after) in _beside_values(translation).items()
        if (_CHINESE.match(before) or _CHINESE.match(after))
        and not any(re.match(r"[\w{}]", side) for side in _beside_values(template)[place])
    }
    assert touched == set()


def _beside_values(text: str) -> dict[int, tuple[str, str]]:
    """Return the characters before and after each value, by the number of the value."""
    slots = enumerate(re.finditer(r"\{(\d*)\}", text), start=1)
    return {
        int(found[1] or place): (text[found.start() - 1 : found.start()], text[found.end() : found.end() + 1])
        for place, found in slots
    }


def test_each_template_is_found_by_the_translator() -> None:
    """Fill each template with values, and find out whether another template takes the text."""
    lost = []
    for template, translation in CATALOGUE.items():
        parts = template.split("{}")
        # A value beside another one begins with a punctuation mark.
        values = [
            f"; v{place}" if place and not part else f"v{place}" for place, part in enumerate(parts[:-1])
        ]
        text = "".join(f"{part}{value}" for part, value in zip(parts, [*values, ""], strict=True))
        expected = translation
        for place, value in enumerate(values, start=1):
            expected = expected.replace("{}", value, 1).replace(f"{{{place}}}", value)
        if _plain(chinese().translate(text)) != _plain(expected):
            lost.append(template)
    assert lost == []


def _plain(text: str) -> str:
    """Return a text without spaces and with ASCII semicolons."""
    return text.replace("\N{FULLWIDTH SEMICOLON}", ";").replace(" ", "")


def test_translations_keep_commands_and_markup() -> None:
    kept = re.compile(r"`[^`{}]+`|\[/?(?:bold|dim|red|yellow|green)\]|SHARE_COMPUTE_[A-Z_]+")
    wrong = [
        template
        for template, translation in CATALOGUE.items()
        if not set(kept.findall(template)) <= set(kept.findall(translation))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "templates"),
    [
        ('x = f"{count} layers of {name}"', ["{} layers of {}"]),
        ("x = f\"{count} {'layer' if count == 1 else 'layers'} here\"", ["{} layer here", "{} layers here"]),
        (
            "x = f\"no column{f'; did you mean {near}?' if near else ''}\"",
            ["no column{}", "; did you mean {}?"],
        ),
        ('def f():\n    """Return the sum of all."""\n    _log.warning("it is late: %s", x)', []),
        ('raise RuntimeError("this cannot happen")', []),
        ('x = typer.Option(help="Wait for the end.")', []),
        ('x = "SELECT name FROM jobs"', []),
    ],
)
def test_templates_are_found(source: str, templates: list[str]) -> None:
    assert [found.template for found in templates_of(source)] == templates
