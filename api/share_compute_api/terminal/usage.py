"""Converts errors of typer about options and arguments to the project's own errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from share_compute.errors import UserError

_WORDS: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]] = (
    (
        r"No such command '(.*?)'\.(?: Did you mean '(.*)'\?| Did you mean one of: '(.*)'\?)?",
        lambda found: f"there is no command {found[1]!r}" + _did_you_mean(_either(found[2] or found[3])),
    ),
    (r"Missing command\.", "a command is missing"),
    (r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", r"there is no place for \1"),
    (r"Option '(.*)' requires an argument\.", r"\1: a value is missing"),
    (r"Option '(.*)' requires (\d+) arguments\.", r"\1: needs \2 values"),
    (r"Option '(.*)' does not take a value\.", r"\1: takes no value"),
)
"""Pattern of a message of typer, with the words in place of it."""


def usage_error(failure: Any) -> UserError:
    """Return an error of typer in the words of the project; the hint names the command's help.

    Args:
        failure: a `typer.exceptions.TyperException` about a command, an option or an argument.
    """
    context = getattr(failure, "ctx", None)
    path = context.command_path if context is not None else "share-compute"
    return UserError(_message(failure), hint=f"{path} --help shows what it takes")


def _message(failure: Any) -> str:
    parameter = getattr(failure, "param", None)
    if parameter is not None:
        is_option = parameter.param_type_name == "option"
        name = parameter.opts[0] if is_option else parameter.metavar or str(parameter.name).upper()
        if type(failure).__name__ == "MissingParameter":
            return f"{name} is missing"
        return f"{name}: {_value_problem(failure.message)}"
    if hasattr(failure, "possibilities"):
        near = sorted(failure.possibilities or ())
        return f"there is no option {failure.option_name!r}" + _did_you_mean(" or ".join(near))
    text = str(failure.format_message())
    for pattern, words in _WORDS:
        if found := re.fullmatch(pattern, text, re.DOTALL):
            return words(found) if callable(words) else found.expand(words)
    return text


def _value_problem(message: str) -> str:
    """Return the problem with the value of an option or argument; the nearest allowed value is suggested."""
    from share_compute.files.problem_words import problem_text
    from share_compute.files.strict import suggestion

    problem = problem_text({"msg": message, "type": "", "loc": ()}).removesuffix(".")
    found = re.match(r"'(.*?)' is not one of (.*)", problem, re.DOTALL)
    if found is None:
        return problem
    return problem + suggestion(found[1].lower(), re.findall(r"'(.*?)'", found[2]))


def _either(quoted: str | None) -> str | None:
    """Return names without the quotation marks between them: ``serve or clear`` for ``serve', 'clear``."""
    return quoted and quoted.replace("', '", " or ")


def _did_you_mean(near: str | None) -> str:
    return f"; did you mean {near}?" if near else ""
