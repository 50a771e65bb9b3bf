"""Members of a group find each other through their channels, without looking up names."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.namespaces import alone, needs_namespaces

from share_compute.errors import ContributorLost, StaleEpoch
from share_compute_actors.transport.channel import Channel
from share_compute_actors.transport.keys import Keys, Peer
from share_compute_actors.transport.rendezvous import ChannelStore, Rendezvous

MEMBERS = ("ann", "bob")


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    keys = [Keys.issue() for _ in MEMBERS]
    admitted = {pair.public: worker for worker, pair in zip(MEMBERS, keys, strict=True)}
    ann, bob = (
        Channel(me, "job", 1, "127.0.0.1", pair, admitted) for me, pair in zip(MEMBERS, keys, strict=True)
    )
    ann.connect(Peer("bob", "bob", bob.endpoint, keys[1].public))
    bob.connect(Peer("ann", "ann", ann.endpoint, keys[0].public))
    yield ann, bob
    ann.close()
    bob.close()


def stores(
    channels: tuple[Channel, Channel], group: str = "group", timeout_s: float = 20.0
) -> list[ChannelStore]:
    meeting = Rendezvous(group, MEMBERS, timeout_s)
    return [ChannelStore(channel, me, meeting) for channel, me in zip(channels, MEMBERS, strict=True)]


def test_what_one_member_sets_the_other_gets(channels: tuple[Channel, Channel]) -> None:
    ann, bob = stores(channels)
    ann.set("empty", b"")
    ann.set("key", bytes(range(256)))
    assert (bob.get("key"), bob.get("key"), bob.get("empty")) == (bytes(range(256)),) * 2 + (b"",)
    assert ann.get("key") == bytes(range(256))
    assert ann.check(["key", "empty"])
    assert not bob.check(["other"])


def test_groups_do_not_see_each_others_keys(channels: tuple[Channel, Channel]) -> None:
    (ann, _), (_, bob) = stores(channels), stores(channels, "another", timeout_s=0.1)
    ann.set("key", b"value")
    with pytest.raises(ContributorLost, match="group another could not form"):
        bob.get("key")


def test_waiting_for_a_key_ends_with_the_epoch(channels: tuple[Channel, Channel]) -> None:
    _, bob = stores(channels)
    channels[1].interrupt()
    with pytest.raises(StaleEpoch):
        bob.get("key")


def test_what_another_thread_sets_is_not_sent(channels: tuple[Channel, Channel]) -> None:
    ann, bob = stores(channels, timeout_s=0.1)
    with ThreadPoolExecutor(1) as other:
        other.submit(ann.set, "key", b"value").result()
    assert ann.get("key") == b"value"
    with pytest.raises(ContributorLost):
        bob.get("key")


@pytest.mark.slow
@needs_namespaces
def test_forming_a_group_calls_no_resolver(tmp_path: Path) -> None:
    script = Path(__file__).with_name("name_lookups.py")
    done = subprocess.run(
        alone([sys.executable, str(script), str(tmp_path)]),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("lookups_on_purpose") >= 1
    assert found == {
        "sums": [3.0] * 3,
        "lookups": 0,
        "sums_after_a_loss": [1.0] * 2,
        "lookups_after_a_loss": 0,
    }
