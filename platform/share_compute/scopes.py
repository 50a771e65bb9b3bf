"""Scopes: the rights of API keys. Some scopes include others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum


class Scope(StrEnum):
    """A right that a key holds and that a route requires."""

    chat = "chat"
    """Use served models through the OpenAI API."""
    read = "read"
    """Read the state of jobs, machines and deployments."""
    submit = "submit"
    """Upload files, and manage own jobs and deployments. Includes ``read`` and ``chat``."""
    contribute = "contribute"
    """Make the requests of one machine's agent."""
    admin = "admin"
    """Manage invites, keys, machines, and the jobs and deployments of all keys. Includes ``submit``."""


GRANTABLE = (Scope.chat, Scope.read, Scope.submit, Scope.admin)
"""Scopes that a request for a new key can name."""

_INCLUDED: dict[Scope, frozenset[Scope]] = {
    Scope.submit: frozenset({Scope.chat, Scope.read}),
    Scope.admin: frozenset({Scope.chat, Scope.read, Scope.submit}),
}


def held(scopes: Iterable[Scope]) -> frozenset[Scope]:
    """Return these scopes and all scopes that they include."""
    return frozenset(one for scope in scopes for one in (scope, *_INCLUDED.get(scope, ())))


def in_order(scopes: Collection[Scope]) -> tuple[Scope, ...]:
    """Return these scopes without duplicates, in the order of their definition."""
    return tuple(scope for scope in Scope if scope in scopes)
