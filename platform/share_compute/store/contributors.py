"""Contributor rows: the machines that joined, their states and their measurements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, func, or_, select, tuple_
from sqlalchemy.orm import Session, aliased

from share_compute.errors import Conflict, ContributorLost, NotAuthorized, NotFound
from share_compute.lifecycle.attempt_events import Offended
from share_compute.lifecycle.states import GONE, ContributorState
from share_compute.protocol.doubts import quarantines
from share_compute.store.database.cursors import read_cursor, write_cursor
from share_compute.store.database.database import Database
from share_compute.store.database.tables import ContributorRow, EventRow, InviteRow
from share_compute.store.events import add_event
from share_compute.store.heartbeats import Heartbeats
from share_compute.store.invites import check_limits, revoke_if_open, usable_invite
from share_compute.store.records import ContributorRecord, PresenceRecord
from share_compute.store.secret import digest, matches, new_id, new_key
from share_compute.store.suggestions import suggested_machine
from share_compute.topology import MOST_DEVICES, Device, Link

_ARRIVING = (
    ContributorState.joining,
    ContributorState.probing,
    ContributorState.ready,
    ContributorState.quarantined,
)
_MEASURED = (ContributorState.probing, ContributorState.ready, ContributorState.quarantined)
REMEMBERED = timedelta(days=1)
"""Time for which a machine that left or was lost is still listed."""


class Contributors:
    """The table of contributors. Each state change writes an event with its reason."""

    def __init__(self, database: Database, clock: Callable[[], datetime], heartbeats: Heartbeats) -> None:
        self._database = database
        self._clock = clock
        self._heartbeats = heartbeats

    def join(
        self, code: str, *, name: str, host: str, versions: dict[str, str], limits: dict[str, Any]
    ) -> tuple[ContributorRecord, str]:
        """Add a machine that joins with an invite; return the machine's record and its new key.

        Write transactions are serialized, so machines that join at the same time cannot exceed the uses of the invite.

        Raises:
            InviteUnknown, InviteUsed, InviteRevoked, InviteExpired: the invite is unknown, used up, revoked or expired.
            UserError: the machine lends more than the invite allows.
            Conflict: a machine with this name is present.
        """
        now = self._clock()
        with self._database.write() as session:
            invite = usable_invite(session, code, now)
            check_limits(invite, limits)
            row, key = _add(
                session, now, name=name, host=host, versions=versions, limits=limits, invite_id=invite.id
            )
            return self._record(row), key

    def join_sibling(
        self, contributor_id: str, *, name: str, host: str, versions: dict[str, str], limits: dict[str, Any]
    ) -> tuple[ContributorRecord, str]:
        """Add another device of a contributor's host as a separate contributor; return its record and its new key.

        Raises:
            NotFound: no contributor has this id.
            NotAuthorized: the operator removed the host, or one of its devices is quarantined.
            UserError: the device lends more than the invite of the host allows.
            Conflict: a machine with this name is present, or the host has `MOST_DEVICES` contributors already.
        """
        with self._database.write() as session:
            family = _family(session, contributor_id)
            hint = "ask for a new invite, and join with another --name"
            if any(row.removed_at is not None for row in family):
                raise NotAuthorized(
                    "the operator removed this host", hint="ask for a new invite and join again"
                )
            for row in family:
                if row.quarantined_for is not None:
                    raise NotAuthorized(
                        f"{row.name} of this host is quarantined: {row.quarantined_for}",
                        hint="ask the operator to clear it: share-compute clear",
                        machine=row.name,
                    )
            if len(family) >= MOST_DEVICES:
                raise Conflict(
                    f"this host joined with {len(family)} devices, the most for one invite", hint=hint
                )
            first = next(row for row in family if row.sibling_of is None)
            _require_allowed(session, first, limits)
            row, key = _add(
                session,
                self._clock(),
                name=name,
                host=host,
                versions=versions,
                limits=limits,
                sibling_of=first.id,
            )
            return self._record(row), key

    def get(self, contributor_id: str) -> ContributorRecord:
        """Return the contributor with this id, or raise NotFound."""
        with self._database.read() as session:
            return self._record(_row(session, contributor_id))

    def page(
        self,
        *,
        states: Collection[ContributorState] | None = None,
        limit: int = 500,
        cursor: str | None = None,
    ) -> tuple[list[ContributorRecord], str | None]:
        """Return a page of contributors in the order they joined, and the cursor of the next page if there is one.

        Args:
            states: states to include; by default all, without machines that left or were lost more than a day ago (see
                `here_since`).
            limit: maximum number of contributors to return.
            cursor: cursor that came with the previous page; None for the first page.
        """
        query = select(ContributorRow).order_by(ContributorRow.joined_at, ContributorRow.id).limit(limit + 1)
        if states is not None:
            query = query.where(ContributorRow.state.in_([state.value for state in states]))
        else:
            query = query.where(here_since(self._clock() - REMEMBERED))
        if cursor is not None:
            query = query.where(
                tuple_(ContributorRow.joined_at, ContributorRow.id) > tuple_(*read_cursor(cursor))
            )
        with self._database.read() as session:
            found = [self._record(row) for row in session.scalars(query)]
        page = found[:limit]
        return page, write_cursor(page[-1].joined_at, page[-1].id) if len(found) > limit else None

    def presences(self, gone_since: datetime) -> list[PresenceRecord]:
        """Return the machines that `here_since` selects for ``gone_since``, in the order they joined.

        Unlike `list`, this method reads no measurements.
        """
        columns = [getattr(ContributorRow, name) for name in PresenceRecord.model_fields]
        query = (
            select(*columns)
            .where(here_since(gone_since))
            .order_by(ContributorRow.joined_at, ContributorRow.id)
        )
        with self._database.read() as session:
            return [
                self._heartbeats.updated(PresenceRecord.model_validate(row)) for row in session.execute(query)
            ]

    def list(
        self,
        states: Collection[ContributorState] | None = None,
        *,
        ids: Collection[str] | None = None,
    ) -> list[ContributorRecord]:
        """Return contributors in the order they joined.

        Args:
            states: only contributors in one of these states; None for all.
            ids: only contributors with one of these ids; None for all.
        """
        query = select(ContributorRow).order_by(ContributorRow.joined_at, ContributorRow.id)
        if ids is not None:
            query = query.where(ContributorRow.id.in_(ids))
        if states is not None:
            query = query.where(ContributorRow.state.in_([state.value for state in states]))
        with self._database.read() as session:
            return [self._record(row) for row in session.scalars(query)]

    def counts(self) -> dict[ContributorState, int]:
        """Return {state: number of contributors}, with 0 for states without contributors."""
        with self._database.read() as session:
            rows = session.execute(
                select(ContributorRow.state, func.count()).group_by(ContributorRow.state)
            ).all()
        found = {ContributorState(state): count for state, count in rows}
        return {state: found.get(state, 0) for state in ContributorState}

    def names(self, ids: Collection[str]) -> dict[str, str]:
        """Return {id: name} of the given contributors, including those that left long ago."""
        with self._database.read() as session:
            rows = session.execute(
                select(ContributorRow.id, ContributorRow.name).where(ContributorRow.id.in_(ids))
            )
            return {contributor_id: name for contributor_id, name in rows}  # noqa: C416 - mypy does not see pairs

    def authorize(self, contributor_id: str, key: str) -> ContributorRecord:
        """Return the contributor if the key belongs to it; otherwise raise NotAuthorized.

        The error does not reveal whether the contributor exists.
        """
        with self._database.read() as session:
            row = session.get(ContributorRow, contributor_id)
            if row is None or not matches(key, row.key_hash):
                raise wrong_key()
            return self._record(row)

    def of_key(self, key: str) -> ContributorRecord | None:
        """Return the contributor that a key belongs to; None if it is not the key of any contributor."""
        with self._database.read() as session:
            row = session.scalar(select(ContributorRow).where(ContributorRow.key_hash == digest(key)))
            return None if row is None else self._record(row)

    def online(self, contributor_id: str, *, node_id: str, address: str) -> ContributorRecord:
        """Store the Ray node and address of a contributor whose raylet runs now, and set its state to ``probing``.

        Raises:
            NotFound: no contributor has this id.
            ContributorLost: the contributor is lost, and was not removed; it may rejoin.
            Conflict: the contributor is leaving, has left, or was removed.
        """
        with self._database.write() as session:
            row = _row(session, contributor_id)
            if row.state == ContributorState.lost and row.removed_at is None:
                raise ContributorLost(
                    f"contributor {row.name} is lost: {row.reason}",
                    hint="let it come back first",
                    machine=row.name,
                )
            if row.state not in _ARRIVING:
                raise Conflict(
                    f"contributor {row.name} is {row.state}: {row.reason}",
                    hint="let it join again with a new invite",
                    machine=row.name,
                )
            row.node_id, row.address = node_id, address
            _move(session, row, ContributorState.probing, "its Ray node is up", self._clock())
            self._heartbeats.note(row.id)
            return self._record(row)

    def ready(
        self,
        contributor_id: str,
        *,
        capacity: Iterable[Device],
        links: Iterable[Link],
        threads: int | None = None,
    ) -> ContributorRecord:
        """Store a contributor's measurements; set its state to ``ready``, or ``quarantined`` if it is in quarantine.

        Args:
            contributor_id: id of the machine.
            capacity: the machine's devices.
            links: the machine's links to other machines and to the Ray head.
            threads: number of threads with which the machine was measured; None for all lent threads.

        Raises:
            NotFound: no contributor has this id.
            Conflict: the contributor's state is not ``probing``, ``ready`` or ``quarantined``.
        """
        with self._database.write() as session:
            row = _row(session, contributor_id)
            _require_measurable(row)
            row.capacity = [asdict(device) for device in capacity]
            row.links = [asdict(link) for link in links]
            row.threads, row.measured_at = threads, self._clock()
            _end_probing(session, row, self._clock())
            return self._record(row)

    def ready_again(self, contributor_id: str) -> ContributorRecord:
        """Set a contributor's state as in `ready`, but keep the stored measurements.

        Raises:
            NotFound: no contributor has this id.
            Conflict: the contributor's state is not ``probing``, ``ready`` or ``quarantined``.
        """
        with self._database.write() as session:
            row = _row(session, contributor_id)
            _require_measurable(row)
            _end_probing(session, row, self._clock())
            return self._record(row)

    def relink(self, contributor_id: str, links: Iterable[Link]) -> None:
        """Store links of a contributor that were measured again; each replaces the stored link to the same target.

        Args:
            contributor_id: id of the machine that measured.
            links: measured links that begin at this machine.
        """
        newer = {link.target: asdict(link) for link in links}
        with self._database.write() as session:
            row = _row(session, contributor_id)
            kept = (link for link in row.links or () if link["target"] not in newer)
            row.links = [*kept, *newer.values()]

    def set_state(
        self, seen: ContributorRecord, state: ContributorState, reason: str
    ) -> ContributorRecord | None:
        """Change a contributor's state and return the new record.

        If the state or the Ray node changed after ``seen`` was read, change nothing and return None. If the new state
        is the current one, only the reason changes and no event is written.

        Args:
            seen: record that the decision was based on; its state and its Ray node are compared.
            state: the new state.
            reason: cause of the change.

        Raises:
            NotFound: no contributor has the id of ``seen``.
            Conflict: the contributor left or is lost; it can then only become ``joining``, ``left`` or ``lost``.
        """
        with self._database.write() as session:
            row = _row(session, seen.id)
            if (row.state, row.node_id) != (seen.state.value, seen.node_id):
                return None
            if row.state in GONE and state not in (*GONE, ContributorState.joining):
                raise Conflict(
                    f"contributor {row.name} is {row.state}; it cannot become {state.value}",
                    hint="let it join again",
                    machine=row.name,
                )
            _move(session, row, state, reason, self._clock())
            return self._record(row)

    def leave(self, contributor_id: str) -> ContributorRecord:
        """Set a contributor's state to ``draining``, or ``left`` if it has no Ray node.

        Do nothing if the contributor has left or is lost.
        """
        with self._database.write() as session:
            row = _row(session, contributor_id)
            is_removed = row.removed_at is not None
            reason = "the operator removed it" if is_removed else "its owner takes it back"
            _drain(session, row, reason, self._clock())
            return self._record(row)

    def remove(self, contributor_id: str, *, revokes_invite: bool = True) -> ContributorRecord:
        """Drain all contributors of a host as `leave` does; they cannot rejoin without an invite.

        Args:
            contributor_id: id of one of them.
            revokes_invite: whether to revoke the invite by which they joined. Otherwise, if it has uses left, the host
                can join with it again, under another name.
        """
        now = self._clock()
        with self._database.write() as session:
            for row in _family(session, contributor_id):
                row.removed_at = row.removed_at or now
                if revokes_invite:
                    revoke_if_open(session, row.invite_id, now)
                _drain(session, row, "the operator removed it", now)
            return self._record(_row(session, contributor_id))

    def clear(self, contributor_id: str) -> ContributorRecord:
        """End the quarantine of a machine, if it is in quarantine, and set its number of offences to 0."""
        with self._database.write() as session:
            row = _row(session, contributor_id)
            row.offences, row.quarantined_for = 0, None
            if row.state == ContributorState.quarantined:
                _move(session, row, ContributorState.ready, "the operator cleared it", self._clock())
            return self._record(row)

    def rejoin(
        self,
        contributor_id: str,
        *,
        versions: dict[str, str] | None = None,
        limits: dict[str, Any] | None = None,
    ) -> ContributorRecord:
        """Set a contributor's state to ``joining``, from any state, because its agent connects again.

        Args:
            contributor_id: id of the machine.
            versions: versions of a restarted agent, whose Ray node is gone; None if the agent was not restarted.
            limits: resources that the machine lends now; None keeps the stored ones.

        Raises:
            NotFound: no contributor has this id.
            NotAuthorized: the operator removed the contributor.
            UserError: the contributor lends more than its invite allows.
            Conflict: another machine has taken the contributor's name.
        """
        now = self._clock()
        with self._database.write() as session:
            row = _row(session, contributor_id)
            if row.removed_at is not None:
                raise NotAuthorized(
                    "the operator removed this machine",
                    hint="ask for a new invite and join again",
                    machine=row.name,
                )
            _refuse_taken_name(session, row.name, but=row.id)
            if versions is not None:  # the agent was restarted, so its Ray node is gone, too
                row.node_id, row.address = None, None
            row.versions = versions or row.versions
            row.limits = limits or row.limits
            first = row if row.sibling_of is None else _row(session, row.sibling_of)
            _require_allowed(session, first, row.limits)
            _move(session, row, ContributorState.joining, "it comes back", now)
            self._heartbeats.note(row.id)
            return self._record(row)

    def _record(self, row: ContributorRow) -> ContributorRecord:
        return self._heartbeats.updated(ContributorRecord.model_validate(row))


def _require_allowed(session: Session, first: ContributorRow, limits: dict[str, Any]) -> None:
    """Raise UserError if ``limits`` exceed those of the invite that ``first`` used to join."""
    invite = session.get(InviteRow, first.invite_id) if first.invite_id is not None else None
    if invite is not None:
        check_limits(invite, limits)


def _require_measurable(row: ContributorRow) -> None:
    if row.state not in _MEASURED:
        raise Conflict(
            f"contributor {row.name} is {row.state}; it cannot become ready",
            hint="let it join again",
            machine=row.name,
        )


def _end_probing(session: Session, row: ContributorRow, now: datetime) -> None:
    if row.quarantined_for is None:
        _move(session, row, ContributorState.ready, "measured and ready", now)
    else:
        _move(session, row, ContributorState.quarantined, row.quarantined_for, now)


def wrong_key() -> NotAuthorized:
    """Return the error for a key that does not belong to the contributor, which may not exist."""
    return NotAuthorized("this is not the key of this contributor", hint="join again with a new invite")


def note_offence(
    session: Session, contributor_id: str, now: datetime, *, job_id: str, offence: Offended
) -> None:
    """Record an offence of a machine; quarantine the machine if the report or `quarantines` requires it.

    If the machine is unknown, do nothing.

    Args:
        session: session of the transaction that records the report.
        contributor_id: id of the machine.
        now: current time.
        job_id: id of the job that reported the offence.
        offence: the reported offence.
    """
    row = session.get(ContributorRow, contributor_id)
    if row is None:
        return
    earlier = session.scalars(
        select(EventRow.data)
        .where(EventRow.contributor_id == row.id, EventRow.kind == "offence")
        .order_by(EventRow.seq.desc())
        .limit(row.offences)  # excludes offences that the operator has cleared
    ).all()
    row.offences += 1
    data = {"name": row.name, **offence.model_dump(mode="json", exclude={"type", "machine"})}
    add_event(session, "offence", now, data, contributor_id=row.id)
    is_over = offence.quarantined or quarantines(offence.accuser, [each.get("accuser") for each in earlier])
    if not is_over or row.quarantined_for is not None:
        return
    row.quarantined_for = f"made wrong numbers in job {job_id}, step {offence.step}: {offence.what}"
    if row.state in (ContributorState.ready, ContributorState.probing):
        _move(session, row, ContributorState.quarantined, row.quarantined_for, now)


def note_cut(session: Session, source: str, target: str) -> None:
    """Store a dead link from one contributor to another in place of the measured one.

    If no contributor has the id ``source``, or none of its links were measured, do nothing.

    Args:
        session: session of the transaction that records the report.
        source: id of the contributor at which the link begins.
        target: id of the contributor at which the link ends.
    """
    row = session.get(ContributorRow, source)
    if row is not None and row.links is not None:
        row.links = [
            *(link for link in row.links if link["target"] != target),
            asdict(Link.dead(source, target)),
        ]


def here_since(moment: datetime) -> ColumnElement[bool]:
    """Return the SQL condition for machines that are present, or that left or were lost at ``moment`` or later.

    The condition excludes a machine that is gone if another machine with its name is present or left later.
    """
    other = aliased(ContributorRow)
    is_later = or_(other.left_at.is_(None), other.left_at > ContributorRow.left_at)
    is_outdated = exists().where(other.name == ContributorRow.name, other.id != ContributorRow.id, is_later)
    return or_(ContributorRow.left_at.is_(None), and_(ContributorRow.left_at >= moment, ~is_outdated))


def _add(
    session: Session,
    now: datetime,
    *,
    name: str,
    host: str,
    versions: dict[str, str],
    limits: dict[str, Any],
    sibling_of: str | None = None,
    invite_id: str | None = None,
) -> tuple[ContributorRow, str]:
    """Add the row of a new contributor; return the row and the contributor's key."""
    _refuse_taken_name(session, name)
    key = new_key("scc")
    row = ContributorRow(
        id=new_id("con"),
        name=name,
        key_hash=digest(key),
        state="",
        reason="",
        host=host,
        versions=versions,
        limits=limits,
        joined_at=now,
        last_seen_at=now,
        sibling_of=sibling_of,
        invite_id=invite_id,
    )
    session.add(row)
    session.flush()
    _move(session, row, ContributorState.joining, "its preflight passed", now)
    return row, key


def _family(session: Session, contributor_id: str) -> Sequence[ContributorRow]:
    """Return the contributors of a host: the one that joined with the invite, and its siblings."""
    row = _row(session, contributor_id)
    first = row.sibling_of or row.id
    return session.scalars(
        select(ContributorRow).where(or_(ContributorRow.id == first, ContributorRow.sibling_of == first))
    ).all()


def _drain(session: Session, row: ContributorRow, reason: str, now: datetime) -> None:
    if row.state in GONE:
        return
    there = row.node_id is not None
    _move(session, row, ContributorState.draining if there else ContributorState.left, reason, now)


def _refuse_taken_name(session: Session, name: str, *, but: str | None = None) -> None:
    live = ContributorRow.state.not_in([state.value for state in GONE])
    other = session.scalar(
        select(ContributorRow.id).where(
            ContributorRow.name == name, live, ContributorRow.id.is_distinct_from(but)
        )
    )
    if other is not None:
        raise Conflict(
            f"a contributor named {name} is in the cluster already ({other})",
            hint="choose another name with --name",
            machine=name,
        )


def _row(session: Session, contributor_id: str) -> ContributorRow:
    row = session.get(ContributorRow, contributor_id)
    if row is None:
        raise NotFound(
            f"there is no machine {contributor_id}{suggested_machine(session, contributor_id)}",
            hint="share-compute contributors lists their names and ids",
        )
    return row


def _move(session: Session, row: ContributorRow, state: ContributorState, reason: str, now: datetime) -> None:
    before, row.state, row.reason = row.state, state.value, reason
    row.left_at = (row.left_at or now) if state in GONE else None
    if state in GONE:
        row.job_id = row.deployment_id = None
    if before != state.value:
        data = {"state": state.value, "from": before or None, "reason": reason, "name": row.name}
        add_event(session, "contributor", now, data, contributor_id=row.id)
