"""Scopes: what an API key may do. One rule says which scope includes which."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum


class Scope(StrEnum):
    """A right that a key holds, and that a route needs."""

    chat = "chat"
    """Use served models by the OpenAI API."""
    read = "read"
    """Look at jobs, machines, plans, deployments, events and metrics."""
    submit = "submit"
    """Upload; submit, cancel, resume and delete one's own jobs and deployments. Includes ``read`` and ``chat``."""
    contribute = "contribute"
    """Speak for one machine. Only the key that a machine gets when it joins holds it."""
    admin = "admin"
    """Everything that API keys can do: also invites, keys, machines, and what belongs to other keys."""


GRANTABLE = (Scope.chat, Scope.read, Scope.submit, Scope.admin)
"""Scopes that an API key can be given: ``contribute`` belongs to machines' own keys."""

_INCLUDED: dict[Scope, frozenset[Scope]] = {
    Scope.submit: frozenset({Scope.chat, Scope.read}),
    Scope.admin: frozenset({Scope.chat, Scope.read, Scope.submit}),
}


def held(scopes: Iterable[Scope]) -> frozenset[Scope]:
    """Return these scopes with all that they include."""
    return frozenset(one for scope in scopes for one in (scope, *_INCLUDED.get(scope, ())))


def in_order(scopes: Collection[Scope]) -> tuple[Scope, ...]:
    """Return these scopes once each, in the order of their definition."""
    return tuple(scope for scope in Scope if scope in scopes)
