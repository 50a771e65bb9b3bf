"""Commands with uniform checks and help of their arguments, and with the project's own error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from share_compute.errors import UserError
from share_compute.settings import PREFIX, VARIABLES, variable_of

_WORDS: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]] = (
    (
        r"No such command '(.*?)'\.(?: Did you mean '(.*)'\?| Did you mean one of: '(.*)'\?)?",
        lambda found: f"there is no command {found[1]!r}" + _did_you_mean(_either(found[2] or found[3])),
    ),
    (r"Missing command\.", "a command is missing"),
    (r"Got unexpected extra argument(?:s|\(s\))? \((?!.* )(.*)\)", r"unexpected argument '\1'"),
    (r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", r"unexpected arguments: \1"),
    (r"Option '(.*)' requires an argument\.", r"\1: a value is missing"),
    (r"Option '(.*)' requires (\d+) arguments\.", r"\1: needs \2 values"),
    (r"Option '(.*)' does not take a value\.", r"\1: takes no value"),
)
"""Pattern of a message of typer, with the words in place of it."""


_INSTEAD = {
    "leave": "press Ctrl-C in `share-compute join`; a service leaves by `share-compute service uninstall`"
}
"""Word that people try as a command -> hint in place of similar names of commands."""

Function = TypeVar("Function", bound=Callable[..., Any])
_EMPTY = "is empty"


class CheckedCommand(TyperCommand):
    """Command that refuses empty arguments and paths; its help shows names of arguments in capitals.

    Scripts that expand an empty variable pass an empty argument, which would mean the working folder if it were a path.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                parameter.metavar = parameter.metavar or str(parameter.name).upper()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and refuse empty ones."""
        is_suspect = any(one == "" or (one.startswith("--") and one.endswith("=")) for one in args)
        rest = super().parse_args(ctx, args)
        parameter: Any
        for parameter in self.params if is_suspect else ():
            value = ctx.params.get(parameter.name)
            # The path in an empty argument is `Path()`.
            empty = ("", Path()) if parameter.param_type_name == "argument" else (Path(),)
            if any(one in empty for one in (value if isinstance(value, list | tuple) else (value,))):
                raise typer.BadParameter(_EMPTY, ctx=ctx, param=parameter)
        return rest


class CommandGroup(typer.Typer):
    """Group of commands of the class `CheckedCommand`."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        """Return a decorator that adds a function as a command."""
        return super().command(name, **{"cls": CheckedCommand, **options})


def usage_error(failure: Any) -> UserError:
    """Convert an error of typer to the project's error; the hint names the command's help.

    Args:
        failure: a `typer.exceptions.TyperException` about a command, an option or an argument.
    """
    context = getattr(failure, "ctx", None)
    path = context.command_path if context is not None else "share-compute"
    message = _message(failure)
    for word, hint in _INSTEAD.items():
        if message.startswith(no_command := f"there is no command {word!r}"):
            return UserError(no_command, hint=hint)
    return UserError(message, hint=help_hint(path))


def help_hint(command: str) -> str:
    """Return the hint that names the help of a command."""
    return f"{command} --help shows what it takes"


def as_given(refused: UserError) -> UserError:
    """Return the error about invalid settings with each setting under the name of its variable or its option."""
    return renamed(refused, _given_name, refused.hint)


def renamed(refused: UserError, name_of: Callable[[str], str], hint: str | None) -> UserError:
    """Return an error about invalid fields with other names of the fields, and another hint."""
    from share_compute.files.field_errors import fields_text

    fields = [{**one, "field": name_of(one["field"])} for one in refused.details["fields"]]
    text = fields_text(fields, len(fields) + refused.details.get("more", 0))
    return UserError(text, hint=hint, details={**refused.details, "fields": fields})


def variable_warnings(environment: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each variable of share-compute that nothing reads, because its name is probably wrong."""
    given = sorted({name.upper() for name in environment if name.upper().startswith(PREFIX)})
    if not given:
        return
    from share_compute.files.strict import nearest

    endings = [name.removeprefix(PREFIX) for name in sorted(VARIABLES)]
    for name in given:
        if name not in VARIABLES:
            near = nearest(name.removeprefix(PREFIX), endings)
            yield f"nothing reads the variable {name}{_did_you_mean(near and PREFIX + near)}"


def _given_name(setting: str) -> str:
    variable = variable_of(setting.partition(".")[0])
    return variable if variable in os.environ else f"--{setting.replace('_', '-')}"


def _message(failure: Any) -> str:
    parameter = getattr(failure, "param", None)
    if parameter is not None:
        is_option = parameter.param_type_name == "option"
        name = parameter.opts[0] if is_option else parameter.metavar or str(parameter.name).upper()
        if type(failure).__name__ == "MissingParameter":
            return f"{name} is missing"
        if failure.message == _EMPTY:
            return f"{name} is empty"
        return f"{name}: {_value_problem(failure.message)}"
    if hasattr(failure, "possibilities"):
        near = sorted(failure.possibilities or ())
        is_number = re.match(r"-\d", failure.option_name)
        more = "; no number is negative" if is_number else _did_you_mean(" or ".join(near))
        return f"there is no option {failure.option_name!r}" + more
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
    """Remove the quotation marks between names: ``serve', 'clear`` becomes ``serve or clear``."""
    return quoted and quoted.replace("', '", " or ")


def _did_you_mean(near: str | None) -> str:
    return f"; did you mean {near}?" if near else ""
