"""Form a group of three processes, lose one, form a group of two; count the DNS queries meanwhile.

`test_rendezvous.py` runs it with a scratch folder, as root of a network and mount namespace of its own.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from share_compute_actors.transport.channel import Channel
from share_compute_actors.transport.collective.backend import form_gloo
from share_compute_actors.transport.collective.sockets import GroupSockets
from share_compute_actors.transport.keys import Keys, Peer
from share_compute_actors.transport.rendezvous import ChannelStore, Rendezvous

ADDRESS, RESOLVER = "192.0.2.1", "192.0.2.53"
here: dict[str, Any] = {}
"""State that a member keeps between calls."""


def run(*command: str) -> None:
    subprocess.run(command, check=True)


class CountingResolver:
    """Answers every DNS query with "no such name", and counts the queries."""

    def __init__(self) -> None:
        self.num_lookups = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((RESOLVER, 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(4096)
            self.num_lookups += 1
            self._socket.sendto(query[:2] + b"\x81\x83" + query[4:6] + bytes(6) + query[12:], sender)


def listen(me: str, epoch: int, keys: Keys, admitted: dict[bytes, str]) -> Peer:
    here["me"], here["channel"] = me, Channel(me, "job", epoch, ADDRESS, keys, admitted)
    return Peer(me, me, here["channel"].endpoint, keys.public)


def join(peers: list[Peer], meeting: Rendezvous) -> float:
    """Form a group and sum the ranks in it."""
    me, channel = here["me"], here["channel"]
    for peer in peers:
        if peer.worker != me:
            channel.connect(peer)
    rank, size = meeting.members.index(me), len(meeting.members)
    store = ChannelStore(channel, me, meeting)
    here["group"] = form_gloo(meeting, store, rank, size, GroupSockets())
    total = torch.tensor([float(rank)])
    here["group"].allreduce([total]).wait()
    return total.item()


def form(members: dict[str, ProcessPoolExecutor], epoch: int) -> list[float]:
    keys = {me: Keys.issue() for me in members}
    admitted = {pair.public: worker for worker, pair in keys.items()}
    listening = [members[me].submit(listen, me, epoch, keys[me], admitted) for me in members]
    peers = [each.result(60) for each in listening]
    meeting = Rendezvous(f"job/{epoch}", tuple(members), 60.0, address=ADDRESS)
    joining = [member.submit(join, peers, meeting) for member in members.values()]
    return [each.result(60) for each in joining]


def main(scratch: Path) -> None:
    configuration = scratch / "resolv.conf"
    configuration.write_text(f"nameserver {RESOLVER}\n")
    run("mount", "--bind", str(configuration), "/etc/resolv.conf")
    for address in (ADDRESS, RESOLVER):
        run("ip", "address", "add", f"{address}/32", "dev", "lo")
    resolver = CountingResolver()
    spawn = get_context("spawn")
    members = {me: ProcessPoolExecutor(1, mp_context=spawn) for me in ("ann", "bob", "cleo")}
    found = {"sums": form(members, 1), "lookups": resolver.num_lookups}
    os.kill(members["cleo"].submit(os.getpid).result(60), signal.SIGKILL)
    del members["cleo"]
    found |= {"sums_after_a_loss": form(members, 2), "lookups_after_a_loss": resolver.num_lookups}
    socket.getnameinfo((ADDRESS, 80), socket.NI_NUMERICSERV)
    found["lookups_on_purpose"] = resolver.num_lookups
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
