"""Keeps Ray from unpickling anything in this process.

Ray encodes bytes, strings, numbers, and lists and dicts of these types as msgpack. It pickles most other values, and
reading a pickle can run code of the sender's choice. After `refuse_pickles` a received pickle is an error:

- an argument: the call fails at the caller;
- an answer: `ray.get` raises `ray.exceptions.RaySystemError`;
- an error: `ray.get` raises `ray.exceptions.UnserializableException`, with the sender's text.

The patches are made for Ray 2.60, which reads pickles in these files: ``_private/serialization.py`` (values, object
references, actor handles), ``exceptions.py`` (errors), ``_private/function_manager.py`` (functions and actor classes),
and ``_raylet.pyx`` (retryable exceptions, metadata of tensors outside the object store). The patches also keep calls
and answers from opening a debugger in this process.

They do not protect from a holder of the cluster's token, because a holder can start processes on the cluster's nodes.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import ray
import ray._raylet
import ray.cloudpickle
from ray._private.function_manager import FunctionActorManager
from ray._private.worker import Worker
from ray.exceptions import RaySystemError, RayTaskError, UnserializableException
from ray.util import rpdb

_ACTORS: Mapping[str, frozenset[str]] = {
    "share_compute_actors.training.coordinator.coordinator": frozenset({"Coordinator"}),
    "share_compute_actors.training.shard_store": frozenset({"ShardStore"}),
    "share_compute_actors.training.rounds.range_server": frozenset({"RangeServer"}),
    "share_compute_actors.machine.contributor": frozenset({"ContributorActor"}),
    "share_compute_actors.training.member.member": frozenset({"Member"}),
    "share_compute_actors.inference.member": frozenset({"ServingMember"}),
    "share_compute_actors.inference.server": frozenset({"DeploymentServer"}),
    "share_compute_actors.inference.weights": frozenset({"ServedWeights"}),
    "share_compute_actors.sparse.coordinator": frozenset({"SparseCoordinator"}),
    "share_compute_actors.sparse.files": frozenset({"SparseFiles"}),
    "share_compute_actors.sparse.server": frozenset({"SparseServer"}),
    "share_compute_actors.sparse.worker": frozenset({"SparseRowsWorker"}),
    "share_compute_actors.testing.mailbox": frozenset({"Mailbox"}),
}
"""Permitted actor classes, by module. A received handle of any other actor class is refused."""


class PickleRefused(pickle.UnpicklingError):
    """A pickle arrived in a process that refuses pickles."""


def refuse_pickles() -> None:
    """Make Ray refuse pickles in this process from now on; repeated calls are harmless."""
    for loader in ("load", "loads"):
        setattr(ray.cloudpickle, loader, _refuse)
        setattr(ray.cloudpickle.cloudpickle, loader, _refuse)
    # `_raylet` is compiled, but it looks up its globals at each use. An error of `ray_pickle.loads` there would end
    # the process, so it returns None instead.
    ray._raylet.ray_pickle = SimpleNamespace(  # noqa: SLF001
        **{**vars(ray.cloudpickle), "load": _nothing, "loads": _nothing}
    )
    ray._raylet.pickle = SimpleNamespace(  # noqa: SLF001
        **{**vars(pickle), "load": _refuse, "loads": _refuse, "Unpickler": _refuse}
    )
    FunctionActorManager._load_actor_class_from_gcs = _actor_class  # noqa: SLF001
    if Worker.get_objects is not _get_objects:
        global _ray_get_objects
        _ray_get_objects, Worker.get_objects = Worker.get_objects, _get_objects
    rpdb.set_trace = _open_no_debugger


def is_refusal(failure: BaseException) -> bool:
    """Return whether the failure of a Ray call is treated as an answer that cannot be decoded."""
    return isinstance(failure, (RaySystemError, UnserializableException, RayTaskError))


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise PickleRefused(
        "this process reads no pickles: only bytes, texts, numbers, lists and dicts are accepted"
    )


def _nothing(*_: Any, **__: Any) -> None:
    """Return None."""


def _actor_class(_: FunctionActorManager, job_id: Any, descriptor: Any) -> type:  # noqa: ARG001 - Ray passes it
    """Import the class of an actor whose handle arrived; Ray itself would unpickle the class."""
    name = descriptor.class_name.rpartition(".")[2]
    if name not in _ACTORS.get(descriptor.module_name, ()):
        raise PickleRefused(f"{descriptor.module_name}.{descriptor.class_name} is no actor of share-compute")
    actor = getattr(importlib.import_module(descriptor.module_name), name)
    found: type = actor.__ray_metadata__.modified_class
    return found


_ray_get_objects: Any = None


def _get_objects(worker: Worker, *arguments: Any, **options: Any) -> tuple[Any, bytes]:
    """Call Ray's own `get_objects`, but drop the request to open a debugger."""
    values, _ = _ray_get_objects(worker, *arguments, **options)
    return values, b""


def _open_no_debugger(*_: Any, **__: Any) -> None:
    """Do nothing when a call asks for a debugger."""
