"""Route that replaces the cluster's token, the secret that all Ray nodes share."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from share_compute.errors import Unavailable
from share_compute_api.schemas.bodies import TokenRotated
from share_compute_api.server.auth import ADMIN
from share_compute_api.server.context import InContext
from share_compute_api.server.problems import documented

router = APIRouter(prefix="/cluster", tags=["server"])


@router.post("/token", operation_id="rotateToken", dependencies=ADMIN, responses=documented(503))
async def rotate_token(context: InContext) -> TokenRotated:
    """Replace the cluster's token, and answer when the Ray head runs with the new token.

    All nodes restart. Running jobs write a checkpoint first and continue from it. Streams of served models continue
    when their replicas run again.
    """
    if context.rotation is None:
        raise Unavailable("this server runs without a Ray cluster", hint="start it with `share-compute up`")
    # If the client disconnects, the replacement must still be completed.
    done = await asyncio.shield(context.rotation.begin())
    return TokenRotated(jobs=done.jobs, seconds=done.seconds)
