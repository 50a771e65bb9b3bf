"""The language of the terminal: English, or Chinese if the locale or the setting ``language`` says so."""

from __future__ import annotations

import os
from functools import cache

from rich.text import Text

from share_compute.translations.translator import Translator, chinese

_LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")
"""Variables of the locale; the first one that is set counts."""


def translated(text: str) -> str:
    """Return a text in the language of the terminal; unchanged if it has no translation."""
    translator = _translator(_chosen())
    return text if translator is None else translator.translate(text)


def styled(text: str) -> Text:
    """Return a text with rich markup in the language of the terminal."""
    return Text.from_markup(translated(text), emoji=False)


def heading(name: str) -> str:
    """Return the heading of a column, the name of a fact or another short label in the language of the terminal."""
    key = f"| {name} |"
    shown = translated(key)
    return name if shown == key else shown


def _chosen() -> str:
    """Return the value of the first environment variable that chooses the language."""
    given = os.environ.get("SHARE_COMPUTE_LANGUAGE")
    return next(filter(None, map(os.environ.get, _LOCALE)), "") if given is None else _setting(given)


@cache
def _setting(given: str) -> str:  # noqa: ARG001 - the key of the cache
    """Return the setting ``language`` if its environment variable has this value."""
    from pydantic import ValidationError

    from share_compute.settings import ClientSettings

    try:
        return ClientSettings().language or ""
    except ValidationError:  # the command itself reports it
        return ""


@cache
def _translator(chosen: str) -> Translator | None:
    return chinese() if chosen.lower().startswith("zh") else None
