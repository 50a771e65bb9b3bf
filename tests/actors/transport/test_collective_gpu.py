"""Groups of GPUs, on NCCL. NCCL needs one GPU for each member, so with one GPU the group has one member."""

from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from share_compute.errors import ContributorLost
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.channel import Channel
from share_compute_actors.transport.keys import Keys
from share_compute_actors.transport.rendezvous import ChannelStore, Rendezvous

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@ray.remote(num_cpus=0)
class Member:
    def join(self, name: str) -> Any:
        """Form a group. Nothing but the group keeps its store."""
        from share_compute_actors.transport.collective.backend import join_group

        meeting, keys = Rendezvous(name, ("ann",), 30.0, address="127.0.0.1"), Keys.issue()
        channel = Channel("ann", "job", 1, "127.0.0.1", keys, {keys.public: "ann"})
        return join_group(meeting, 0, 1, torch.device("cuda"), ChannelStore(channel, "ann", meeting))

    def add(self, name: str) -> tuple[list[float], list[float]]:
        """Sum with a group that is left at the end, and begin one sum during a backward pass."""
        from share_compute_actors.transport.collective.backend import leave_group

        group = self.join(name)
        own = torch.ones(5, device="cuda", requires_grad=True)
        waits: list[Callable[[], None]] = []
        hook: Any = own.register_post_accumulate_grad_hook
        hook(lambda parameter: waits.append(group.start_allreduce(parameter.grad)))
        own.sum().backward()
        waits.pop()()
        assert own.grad is not None
        tree, held = SummationTree((1, 1, 1)), [Node(place, place + 1) for place in range(3)]
        values = torch.tensor([1e8, 1.0, -1e8], device="cuda")
        out = torch.zeros(5, device="cuda")
        group.start_tree_sum([value.repeat(5) for value in values], [held], tree, out)()
        torch.cuda.synchronize()
        group.require_whole()
        leave_group(group)
        return own.grad.tolist(), out.tolist()

    def ends(self, name: str) -> str:
        """Abort a group, and return the error of its next operation."""
        from share_compute_actors.transport.collective.backend import abort_group, leave_group

        group = self.join(name)
        assert abort_group(name)
        try:
            group.require_whole()
        except ContributorLost as failure:
            leave_group(group)
            assert not abort_group(name)
            return failure.message
        return ""


def test_sums_on_a_gpu(ray_cluster: Cluster) -> None:
    ray_cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 * 2**20)
    member = Member.options(num_gpus=1).remote()
    own, added = ray.get(member.add.remote("first"), timeout=120)
    assert own == [1.0] * 5
    # A process forms the group of each epoch, in some of which members are lost.
    assert "was ended" in ray.get(member.ends.remote("second"), timeout=60)
    assert ray.get(member.add.remote("third"), timeout=60) == (own, added)
    tree, values = SummationTree((1, 1, 1)), torch.tensor([1e8, 1.0, -1e8])
    left, right = tree.children(tree.root) or (tree.root, tree.root)
    sums = {
        Node(0, 1): values[0],
        Node(1, 3): values[1] + values[2],
        Node(0, 2): values[0] + values[1],
        Node(2, 3): values[2],
    }
    assert added == [float(sums[left] + sums[right])] * 5
    ray.kill(member)
