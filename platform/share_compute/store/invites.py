"""Invites: codes that let one machine join, once, for a time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from share_compute.errors import InviteExpired, InviteRevoked, InviteUnknown, InviteUsed, NotFound
from share_compute.store.database import Database
from share_compute.store.records import InviteRecord, InviteState, invite_state
from share_compute.store.secret import digest, new_id, new_invite_code, plain_invite_code
from share_compute.store.tables import Invite

_MEND = "ask the pool's operator for a new invite: share-compute invite"


class Invites:
    """The table of invites."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def create(self, label: str | None = None, expires_in_s: float = 3600) -> tuple[InviteRecord, str]:
        """Make an invite; returns its record and the code, which cannot be read again."""
        code = new_invite_code()
        now = self._clock()
        with self._database.write() as session:
            row = Invite(
                id=new_id("inv"),
                code_hash=digest(plain_invite_code(code)),
                label=label,
                created_at=now,
                expires_at=now + timedelta(seconds=expires_in_s),
            )
            session.add(row)
            session.flush()
            return InviteRecord.model_validate(row), code

    def list(self) -> list[InviteRecord]:
        """Return all invites, newest first."""
        with self._database.read() as session:
            rows = session.scalars(select(Invite).order_by(Invite.created_at.desc(), Invite.id))
            return [InviteRecord.model_validate(row) for row in rows]

    def check(self, code: str) -> InviteRecord:
        """Return the invite if the code can be used now, without using it.

        Raises:
            InviteUnknown, InviteUsed, InviteRevoked, InviteExpired: it cannot.
        """
        with self._database.read() as session:
            return InviteRecord.model_validate(usable_invite(session, code, self._clock()))

    def revoke(self, invite_id: str) -> InviteRecord:
        """Take an invite back; twice changes nothing.

        Raises:
            NotFound: there is no such invite.
            InviteUsed: a machine joined with it already.
        """
        with self._database.write() as session:
            row = session.get(Invite, invite_id)
            if row is None:
                raise NotFound(f"there is no invite {invite_id}", mend="share-compute invite list shows them")
            if row.used_at is not None:
                raise InviteUsed(
                    f"invite {invite_id} was used by {row.used_by}",
                    mend=f"send the machine away: {row.used_by}",
                )
            row.revoked_at = row.revoked_at or self._clock()
            return InviteRecord.model_validate(row)


def usable_invite(session: Session, code: str, now: datetime) -> Invite:
    """Return the row of a code that can be used at ``now``, or raise which way it cannot."""
    row = session.scalar(select(Invite).where(Invite.code_hash == digest(plain_invite_code(code))))
    if row is None:
        raise InviteUnknown("no invite has this code", mend="check the code for typing errors, or " + _MEND)
    state = invite_state(InviteRecord.model_validate(row), now)
    if state is InviteState.used:
        raise InviteUsed("this invite was used already; each works once", mend=_MEND)
    if state is InviteState.revoked:
        raise InviteRevoked("this invite was revoked", mend=_MEND)
    if state is InviteState.expired:
        raise InviteExpired(f"this invite expired at {row.expires_at:%Y-%m-%d %H:%M:%S} UTC", mend=_MEND)
    return row
