"""Routes for invites: codes that let machines join."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request

from share_compute.store import InviteRecord
from share_compute.store.records import invite_state
from share_compute_api.connection.fingerprints import join_invite
from share_compute_api.connection.join_line import join_command
from share_compute_api.schemas.bodies import InviteCreated, InviteList, InviteRequest, InviteView
from share_compute_api.server.auth import ADMIN
from share_compute_api.server.context import Context, InContext
from share_compute_api.server.problems import documented

router = APIRouter(prefix="/invites", tags=["invites"])


def _views(context: Context, records: Sequence[InviteRecord]) -> list[InviteView]:
    names = context.store.contributors.names([used_by for record in records for used_by in record.used_by])
    now = context.store.clock()
    return [
        InviteView(
            **record.model_dump(),
            state=invite_state(record, now),
            machines=tuple(names[used_by] for used_by in record.used_by),
        )
        for record in records
    ]


@router.post("", status_code=201, operation_id="createInvite", dependencies=ADMIN)
def create_invite(wanted: InviteRequest, context: InContext, request: Request) -> InviteCreated:
    """Create an invite. Only this answer contains the invite's code."""
    record, code = context.store.invites.create(
        wanted.label, wanted.expires_in_s, uses=wanted.uses, memory_bytes=wanted.memory_bytes
    )
    invite = join_invite(code, context.fingerprint)
    return InviteCreated(
        id=record.id,
        code=invite,
        expires_at=record.expires_at,
        uses=record.uses,
        join_command=join_command(context.url(request), invite, insecure=context.settings.insecure),
    )


@router.get("", operation_id="listInvites", dependencies=ADMIN)
def list_invites(context: InContext) -> InviteList:
    """List all invites, newest first, without their codes."""
    return InviteList(invites=_views(context, context.store.invites.list()))


@router.delete(
    "/{invite_id}", operation_id="revokeInvite", dependencies=ADMIN, responses=documented(404, 409)
)
def revoke_invite(invite_id: str, context: InContext) -> InviteView:
    """Revoke an invite that has uses left. Machines that joined with the invite stay."""
    return _views(context, [context.store.invites.revoke(invite_id)])[0]
