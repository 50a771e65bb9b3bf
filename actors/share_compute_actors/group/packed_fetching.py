"""Loads ranges of weights, contributions and updates from other machines, without unpickling their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError, RayError
from torch import Tensor

from share_compute.errors import ContributorLost, ShareComputeError, StaleEpoch, VerificationFailed
from share_compute_actors.group.fetching import SourceClient, fill
from share_compute_actors.messages import Source, Sources
from share_compute_actors.transport.pieces import PIECES
from share_compute_actors.transport.traffic import Traffic
from share_compute_actors.wire import unpack_answer


class PackedClient(SourceClient):
    """Calls actors that answer with packed pieces.

    Args:
        sources: the actors.
        traffic: counter and limit of received bytes; None for neither.
        folder: folder of the actors to read from, for `RangeServer.rows`; None for members, which have no folders.
    """

    def __init__(self, sources: Sources, traffic: Traffic | None, folder: str | None = None) -> None:
        super().__init__(sources, traffic=traffic)
        self._folder = () if folder is None else (folder,)

    def begin(self, source: Source, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method of a source, and return a function that waits for its pieces."""
        return partial(self._unpacked, source.ask(method, *self._folder, *arguments), source)

    def _unpacked(self, answer: Any, source: Source) -> Any:
        try:
            return unpack_answer(PIECES, ray.get(answer), source.name)
        except (RayActorError, ObjectLostError) as failure:
            raise (lost(source) if self._folder else _lost_member()) from failure
        except RayError as failure:
            raise VerificationFailed(
                f"{source.name} sent what cannot be read", machine=source.name, hint="look at its log"
            ) from failure


def lost(source: Source) -> ContributorLost:
    """Return the error for a machine that was lost while a range was read from it."""
    return ContributorLost(
        f"{source.name} was lost while a range of the weights was read from it",
        machine=source.name,
        hint="no action needed: another machine has the range as well",
    )


def _lost_member() -> StaleEpoch:
    return StaleEpoch(
        "a member died while its part of a contribution was read",
        hint="no action needed: the next epoch begins",
    )


def filled(
    client: PackedClient, method: str, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Load tensors; report errors of sources as `ContributorLost`, so that the caller reads the data elsewhere.

    Args:
        client: calls the sources of the tensors.
        method: name of the sources' method that returns rows.
        tensors: tensors to fill, by stored name.
        dtype: dtype of the tensors.

    Raises:
        ContributorLost: a source was lost, failed, or sent data that does not fit.
        StaleEpoch: a member died.
    """
    if not tensors:
        return
    try:
        fill(tensors, client, method, dtype=dtype)
    except (ContributorLost, StaleEpoch):
        raise
    except ShareComputeError as failure:
        raise ContributorLost(failure.message, machine=failure.machine, hint=failure.hint) from failure
