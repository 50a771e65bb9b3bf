"""Our backend of Ray's collective API, used through Ray's own functions, in actors on several nodes."""

from typing import Any

import pytest
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import ContributorLost
from share_compute_actors.messages import Rendezvous

WORLD = 3


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def join(self, meeting: Rendezvous, world: int) -> None:
        from share_compute_actors.collective import join_group

        join_group(meeting, self.rank, world, torch.device("cpu"))

    def exercise(self, group: str) -> dict[str, Any]:
        from ray.util import collective

        own = torch.full((4,), float(self.rank + 1))
        summed, largest, told = own.clone(), own.clone(), own.clone()
        collective.allreduce(summed, group)
        collective.allreduce(largest, group, op=collective.types.ReduceOp.MAX)
        collective.broadcast(told, src_rank=1, group_name=group)
        gathered = [torch.zeros(4) for _ in range(WORLD)]
        collective.allgather(gathered, own, group)
        collective.barrier(group)
        return {
            "sum": summed.tolist(),
            "max": largest.tolist(),
            "broadcast": told.tolist(),
            "gathered": [tensor[0].item() for tensor in gathered],
        }


def workers(nodes: list[Any]) -> list[Any]:
    return [
        Worker.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[rank].node_id, soft=False)
        ).remote(rank)
        for rank in range(WORLD)
    ]


@pytest.fixture
def meeting() -> Any:
    from share_compute_actors.collective import Meeting

    return Meeting("127.0.0.1", 30.0)


def rendezvous(meeting: Any, name: str, timeout_s: float = 30.0) -> Rendezvous:
    return Rendezvous(name, meeting.host, meeting.port, timeout_s, address="127.0.0.1")


def test_rays_own_functions_work_on_it(nodes: list[Any], meeting: Any) -> None:
    crew = workers(nodes)
    ray.get([worker.join.remote(rendezvous(meeting, "job/1/0/0"), WORLD) for worker in crew])
    for told in ray.get([worker.exercise.remote("job/1/0/0") for worker in crew]):
        assert told == {
            "sum": [6.0] * 4,
            "max": [3.0] * 4,
            "broadcast": [2.0] * 4,
            "gathered": [1.0, 2.0, 3.0],
        }


@pytest.mark.chaos
def test_survivors_form_the_next_epochs_group_in_the_same_processes(nodes: list[Any], meeting: Any) -> None:
    from ray.util import collective  # noqa: F401 - loads what the workers use

    crew = workers(nodes)
    ray.get([worker.join.remote(rendezvous(meeting, "job/1/0/0", 5.0), WORLD) for worker in crew])
    ray.kill(crew[2])
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get([worker.exercise.remote("job/1/0/0") for worker in crew[:2]])
    assert isinstance(caught.value.cause, ContributorLost)
    ray.get([worker.join.remote(rendezvous(meeting, "job/1/1/0", 5.0), 2) for worker in crew[:2]], timeout=20)
