"""Invites: codes with which a limited number of machines can join for a limited time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from share_compute.errors import InviteExpired, InviteRevoked, InviteUnknown, InviteUsed, NotFound, UserError
from share_compute.quantities import bytes_text, listed
from share_compute.store.database.database import Database
from share_compute.store.database.tables import ContributorRow, InviteRow
from share_compute.store.records import InviteRecord, InviteState, invite_state
from share_compute.store.secret import digest, new_id, new_invite_code, plain_invite_code
from share_compute.store.suggestions import suggested_invite

_HINT = "ask the operator of the cluster for a new invite: share-compute invite"


class Invites:
    """The table of invites."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def create(
        self,
        label: str | None = None,
        expires_in_s: float = 3600,
        *,
        uses: int = 1,
        memory_bytes: int | None = None,
        replaces: bool = False,
    ) -> tuple[InviteRecord, str]:
        """Create an invite; return its record and the code, which cannot be read again.

        Args:
            label: recipient or purpose of the invite.
            expires_in_s: lifetime of the invite, in seconds.
            uses: number of machines that may join with the invite.
            memory_bytes: maximum memory that each machine may lend, in bytes; default: no limit.
            replaces: whether the invite replaces the unused ones with the same label: open ones are revoked, ended
                ones are deleted.
        """
        code = new_invite_code()
        now = self._clock()
        with self._database.write() as session:
            if replaces:
                _end_unused(session, label, now)
            row = InviteRow(
                id=new_id("inv"),
                code_hash=digest(plain_invite_code(code)),
                label=label,
                uses=uses,
                memory_bytes=memory_bytes,
                created_at=now,
                expires_at=now + timedelta(seconds=expires_in_s),
            )
            session.add(row)
            session.flush()
            return _record(session, row), code

    def list(self) -> list[InviteRecord]:
        """Return all invites, newest first."""
        with self._database.read() as session:
            rows = session.scalars(
                select(InviteRow).order_by(InviteRow.created_at.desc(), InviteRow.id)
            ).all()
            return _records(session, rows)

    def check(self, code: str) -> InviteRecord:
        """Return the invite with this code if machines can join with it now. This does not use up the invite.

        Raises:
            InviteUnknown, InviteUsed, InviteRevoked, InviteExpired: the invite is unknown, used up, revoked or expired.
        """
        with self._database.read() as session:
            return _record(session, usable_invite(session, code, self._clock()))

    def revoke(self, invite_id: str) -> InviteRecord:
        """Revoke an invite. Machines that joined with the invite stay.

        Raises:
            NotFound: no invite has this id.
            InviteUsed: all uses of the invite are used up.
        """
        with self._database.write() as session:
            row = session.get(InviteRow, invite_id)
            if row is None:
                text = f"there is no invite {invite_id}{suggested_invite(session, invite_id)}"
                raise NotFound(text, hint="share-compute invite list shows them")
            used_by = _record(session, row).used_by
            if len(used_by) >= row.uses:
                raise InviteUsed(
                    f"invite {invite_id} was used by {listed(used_by)}",
                    hint="remove the machines: share-compute remove MACHINE",
                )
            row.revoked_at = row.revoked_at or self._clock()
            return _record(session, row)


def usable_invite(session: Session, code: str, now: datetime) -> InviteRow:
    """Return the row of the invite with this code; raise an error with the reason if it cannot be used at ``now``."""
    row = session.scalar(select(InviteRow).where(InviteRow.code_hash == digest(plain_invite_code(code))))
    if row is None:
        raise InviteUnknown("no invite has this code", hint="check the code for typing errors, or " + _HINT)
    state = invite_state(_record(session, row), now)
    if state is InviteState.used:
        often = "once" if row.uses == 1 else f"{row.uses} times"
        raise InviteUsed(f"this invite was used already; it works {often}", hint=_HINT)
    if state is InviteState.revoked:
        raise InviteRevoked("this invite was revoked", hint=_HINT)
    if state is InviteState.expired:
        raise InviteExpired(f"this invite expired at {row.expires_at:%Y-%m-%d %H:%M:%S} UTC", hint=_HINT)
    return row


def _end_unused(session: Session, label: str | None, now: datetime) -> None:
    """Revoke the open ones of the unused invites with a label, and delete the others."""
    for row in session.scalars(select(InviteRow).where(InviteRow.label == label)).all():
        invite = _record(session, row)
        if invite.used_by:
            continue
        if invite_state(invite, now) is InviteState.open:
            row.revoked_at = now
        else:
            session.delete(row)


def revoke_if_open(session: Session, invite_id: str | None, now: datetime) -> None:
    """Revoke an invite with which machines could still join."""
    row = None if invite_id is None else session.get(InviteRow, invite_id)
    if row is not None and invite_state(_record(session, row), now) is InviteState.open:
        row.revoked_at = now


def check_limits(invite: InviteRow, limits: dict[str, Any]) -> None:
    """Raise UserError if a machine lends more than its invite allows."""
    lent, most = limits.get("memory_bytes", 0), invite.memory_bytes
    if most is not None and lent > most:
        raise UserError(
            f"this machine lends {bytes_text(lent)} of memory, and its invite allows {bytes_text(most)}",
            hint=f"join with --memory {most}",
        )


def _record(session: Session, row: InviteRow) -> InviteRecord:
    return _records(session, [row])[0]


def _records(session: Session, rows: Sequence[InviteRow]) -> list[InviteRecord]:
    joined: dict[str | None, list[tuple[str, datetime]]] = {row.id: [] for row in rows}
    query = select(ContributorRow.invite_id, ContributorRow.id, ContributorRow.joined_at)
    query = query.where(ContributorRow.invite_id.in_(joined)).order_by(
        ContributorRow.joined_at, ContributorRow.id
    )
    for invite_id, contributor_id, joined_at in session.execute(query):
        joined[invite_id].append((contributor_id, joined_at))
    return [
        InviteRecord(
            id=row.id,
            label=row.label,
            uses=row.uses,
            memory_bytes=row.memory_bytes,
            created_at=row.created_at,
            expires_at=row.expires_at,
            used_at=joined[row.id][-1][1] if joined[row.id] else None,
            used_by=tuple(contributor_id for contributor_id, _ in joined[row.id]),
            revoked_at=row.revoked_at,
        )
        for row in rows
    ]
