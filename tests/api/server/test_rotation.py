"""A replacement of the cluster's token: which machines rejoin, and what happens if the server stops meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.api.playing import AT_ONCE, Cluster

from share_compute.lifecycle.states import ContributorState
from share_compute.settings import Settings
from share_compute.store import Store
from share_compute_api.app.app import create_app
from share_compute_api.server.context import Context
from share_compute_api.server.token_rotation import TokenRotation


class Token:
    """The part of the cluster that replaces its token, when the test lets it."""

    def __init__(self) -> None:
        self.was_called = asyncio.Event()
        self.may_end = asyncio.Event()

    async def rotate_token(self) -> None:
        self.was_called.set()
        await self.may_end.wait()


def test_machines_in_every_state_are_called_back(store: Store, tmp_path: Path) -> None:
    async def story() -> None:
        cluster, token = Cluster(store, tmp_path / "jobs", AT_ONCE), Token()
        joining = cluster.join("joining")
        probing, ready, leaving, gone = (
            cluster.join(name) for name in ("probing", "ready", "leaving", "gone")
        )
        store.contributors.online(probing, node_id="aa", address="192.0.2.7")
        for machine in (ready, leaving):
            cluster.arrive(machine)
        store.contributors.leave(leaving)
        store.contributors.leave(gone)
        quarantined = cluster.contributor("quarantined")
        seen = store.contributors.get(quarantined)
        store.contributors.set_state(seen, ContributorState.quarantined, "it made wrong numbers")
        token.may_end.set()
        await TokenRotation(token, cluster.supervisor, store, asyncio.create_task).begin()
        for machine in (joining, probing, ready, quarantined):
            assert store.contributors.get(machine).state is ContributorState.lost
        for machine in (leaving, gone):
            record = store.contributors.get(machine)
            assert (record.state, record.reason) == (ContributorState.left, "its owner takes it back")

    asyncio.run(story())


def test_a_change_of_the_token_ends_with_the_server(store: Store, tmp_path: Path) -> None:
    async def story() -> None:
        app = create_app(Settings(data_folder=tmp_path / "data", database_url=None), store)
        context: Context = app.state.context
        cluster, token = Cluster(store, tmp_path / "jobs", AT_ONCE), Token()
        rotation = TokenRotation(token, cluster.supervisor, store, context.spawn)
        async with app.router.lifespan_context(app):
            under_way = rotation.begin()
            await token.was_called.wait()
        assert under_way.cancelled()

    asyncio.run(story())
