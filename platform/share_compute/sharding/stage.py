"""A stage whose layers several ranks compute together, led by the first rank.

The first rank runs the model's own code, with the layers replaced. The other ranks follow its commands: each runs its
part of a layer forward, and later backward. `share_compute.sharding.rank_memory` has their parameters and gradients.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from struct import Struct
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_map

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.boundary import boundary_shape
from share_compute.models.devices import computing_in
from share_compute.models.stage import Stage
from share_compute.planning.operators.plan import LayerOperators
from share_compute.sharding.execution import ShardedLayer
from share_compute.sharding.layer_plans import Call, empty_copy, planned, undivided
from share_compute.sharding.outdated import Outdated
from share_compute.sharding.rank_memory import RankMemory
from share_compute.specification.placement.operators import NO_STRATEGIES, OperatorsSpec

_Kind = Literal["forward", "backward", "discard", "refresh"]
_KINDS: tuple[_Kind, ...] = get_args(_Kind)
_FIELDS = Struct("<BIQ???B")
_DTYPES = torch.float32, torch.bfloat16, torch.float16


class Command(NamedTuple):
    """Command of the first rank to the other ranks."""

    kind: _Kind
    layer: int = 0
    """Index of the layer in the whole model."""
    cell: int = 0
    """Number of a forward pass of a layer; 0 if no backward pass follows. For a refresh, the value of `Outdated`."""
    is_known: bool = False
    """Whether the tensor is the result of the previous command of this kind, which each rank has."""
    needs_gradient: bool = False
    """Whether the input of the forward pass needs a gradient."""
    trains: bool = False
    """Whether the layer is in its training mode."""
    number_type: int = 0
    """Index of the tensor's dtype among float32, bfloat16 and float16."""

    def pack(self) -> bytes:
        """Return the command as ``SIZE`` bytes."""
        return _FIELDS.pack(_KINDS.index(self.kind), *self[1:])

    @classmethod
    def unpack(cls, data: bytes) -> Command:
        """Return the command that `pack` wrote."""
        kind, *rest = _FIELDS.unpack(data)
        return cls(_KINDS[kind], *rest)


SIZE = _FIELDS.size
"""Size of a packed command in bytes."""


class Followers(Protocol):
    """The other ranks, as the first rank uses them."""

    def send(self, command: Command) -> None:
        """Give all other ranks a command."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which all ranks compute; it translates their failures."""


class DividedLayer:
    """This rank's part of one layer.

    Args:
        layer: the whole layer.
        sharded: the layer's graph and plan, with parameters on the meta device.
        call: arguments of the calls that are divided.
        leaving: output of such a call, on the meta device.
        blueprint: the model, with the precision, and whether the backward pass computes the forward pass again.
    """

    def __init__(
        self, layer: nn.Module, sharded: ShardedLayer, call: Call, leaving: Tensor, blueprint: Blueprint
    ) -> None:
        self.layer = layer
        self.leaving = leaving
        (self.entering, *self._arguments), self._options = call
        self._fixed, self._tensors = _leaves(self._arguments, self._options)
        self.sharded = sharded
        self._precision = blueprint.precision
        self.recomputes = blueprint.activation_checkpointing
        """Whether the backward pass reads the parameters, because it computes the forward pass again."""
        self._open: dict[int, tuple[Tensor, Tensor | None]] = {}
        """Input and output of this rank's autograd graph, by cell; the output is None if it is recomputed."""
        self.parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        """Trained parameters of the whole layer."""
        self.memory: RankMemory | None = None
        """Memory with the parameters; None until it is placed."""

    @property
    def placed(self) -> RankMemory:
        """The memory with the parameters."""
        assert self.memory is not None
        return self.memory

    def take_arguments(self, taken: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensors among the arguments of calls, other than the hidden states.

        Args:
            taken: returns the tensor to use in place of one.
        """
        moved = tree_map(
            lambda leaf: taken(leaf) if isinstance(leaf, Tensor) else leaf, (self._arguments, self._options)
        )
        self._arguments, self._options = moved
        self._fixed, self._tensors = _leaves(self._arguments, self._options)

    def fits(self, hidden: Tensor, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        """Return whether a call has the arguments that the layer was divided for; hidden states may differ."""
        if hidden.shape != self.entering.shape or set(options) != set(self._options):
            return False
        fixed, tensors = _leaves(arguments, {name: options[name] for name in self._options})
        return fixed == self._fixed and all(map(torch.equal, tensors, self._tensors))

    def forward(self, command: Command, hidden: Tensor) -> Tensor:
        """Return the whole output for a whole input, and keep the tensors that the backward pass needs."""
        self.sharded.train(command.trains)
        leaf = hidden.detach().requires_grad_(command.needs_gradient)
        with torch.set_grad_enabled(bool(command.cell) and not self.recomputes):
            output = self._computed(leaf)
        if command.cell:
            self._open[command.cell] = leaf, None if self.recomputes else output
        return output.detach()

    def _computed(self, hidden: Tensor) -> Tensor:
        with computing_in(self._precision, hidden.device):
            output: Tensor = self.sharded(hidden, *self._arguments, **self._options)
        return output

    def backward(self, cell: int, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradient of the input, if it is needed, and those of the parameters; see `RankMemory.collect`."""
        leaf, output = self._open.pop(cell)
        if output is None:
            with torch.enable_grad():
                output = self._computed(leaf)
        trained = self.placed.trained
        inputs = [*([leaf] if leaf.requires_grad else []), *trained]
        found = list(torch.autograd.grad(output, inputs, gradient, allow_unused=True))
        reached = found.pop(0) if leaf.requires_grad else None
        return [reached, *self.placed.collect(found)]

    def discard(self, cell: int) -> None:
        """Drop the tensors kept for a backward pass that will not run."""
        self._open.pop(cell, None)


def _leaves(arguments: Sequence[Any], options: Mapping[str, Any]) -> tuple[list[Any], list[Tensor]]:
    """Return the tensors among some values, and the values with None in place of the tensors."""
    leaves, structure = tree_flatten((list(arguments), dict(options)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [*(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), structure], tensors


class _Recipe(NamedTuple):
    """Result of planning a layer."""

    sharded: ShardedLayer
    plan: LayerOperators
    leaving: Tensor
    """Output of the layer, on the meta device."""


class DividedStage:
    """The layers of a stage, divided between the ranks of a mesh.

    All ranks make this object with equal arguments. Then they call `keep_parts`. The first rank calls `lead`, and the
    others call `follow` for each command.

    Args:
        stage: the stage. Ranks other than the first later use only its layers.
        blueprint: blueprint of the whole model.
        batch: samples in a microbatch.
        length: tokens of a sample, for texts.
        mesh: the ranks, in one dimension.
        operators: how operators are divided.

    Raises:
        UserError: no layer of the stage with parameters can be divided, or a given strategy is not legal.
    """

    def __init__(
        self,
        stage: Stage,
        blueprint: Blueprint,
        batch: int,
        length: int,
        mesh: DeviceMesh,
        operators: OperatorsSpec = NO_STRATEGIES,
    ) -> None:
        self._mesh = mesh
        self._layers: dict[int, DividedLayer] = {}
        self.plans: dict[int, LayerOperators] = {}
        """Plan of each divided layer, by its index."""
        self.whole: dict[int, str] = {}
        """Reason for each layer that the first rank computes alone."""
        self._discarded: deque[tuple[int, int]] = deque()
        """Layer and cell of forward passes of which no backward pass will come."""
        stage.module.train()
        calls = _recorded_calls(stage, _sample(stage, blueprint, batch, length))
        recipes: dict[int, _Recipe | str] = {}
        for place, alike in _kinds(stage, blueprint).items():
            layer, call = stage.layers[place], calls[place]
            first = alike if _are_equal(calls[alike], call) else place
            if first not in recipes:
                recipes[first] = _recipe(layer, call, mesh, operators)
            recipe = recipes[first]
            if isinstance(recipe, str):
                self.whole[place] = recipe
                continue
            self.plans[place] = recipe.plan
            sharded = recipe.sharded if first == place else recipe.sharded.alike(empty_copy(layer))
            self._layers[place] = DividedLayer(layer, sharded, call, recipe.leaving, blueprint)
        self._require_some(stage)
        self._known: dict[str, tuple[Tensor, int]] = {}
        """Last result of each kind of command, and its version."""
        self._cells = 0

    def _require_some(self, stage: Stage) -> None:
        for place, layer in stage.layers.items():
            if not self._layers and any(True for _ in layer.parameters()):
                raise undivided(stage.shard, self._mesh.size(), place, self.whole[place])

    def keep_parts(self) -> None:
        """Keep this rank's parts of the parameters on its own device; all ranks call this together.

        The arguments of layers, such as position embeddings, become those of the first rank.
        """
        moved: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, whose id thus stays in use
        group, device = self._mesh.get_group(), torch.device(self._mesh.device_type)

        def taken(tensor: Tensor) -> Tensor:
            if id(tensor) not in moved:
                own = tensor.detach().to(device).contiguous()
                distributed.broadcast(own, 0, group=group)
                moved[id(tensor)] = tensor, own
            return moved[id(tensor)][1]

        for each in self._layers.values():
            each.take_arguments(taken)
            each.memory = RankMemory(each.layer, each.sharded)

    def outdate(self, what: Outdated) -> None:
        """Note on the first rank that it may have changed parameters since the last cell."""
        for each in self._layers.values():
            each.placed.outdate(what)

    @property
    def words(self) -> str:
        """A sentence on the layers that are divided, and on the others."""
        text = f"{self._mesh.size()} ranks divide layers {', '.join(map(str, self._layers))}"
        alone = [f"{place} ({reason})" for place, reason in self.whole.items()]
        return f"{text}; the first rank computes alone: {', '.join(alone)}" if alone else text

    # -- the first rank ----------------------------------------------------------------------------------------------

    def lead(self, followers: Followers) -> None:
        """Replace the divided layers of the stage; calls with other arguments than the planned ones are not divided."""
        for place, layer in self._layers.items():
            layer.layer.forward = partial(self._run, followers, place, layer.layer.forward)

    def _run(
        self,
        followers: Followers,
        place: int,
        alone: Callable[..., Any],
        hidden: Tensor,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        layer = self._layers[place]
        if not layer.fits(hidden, arguments, options):
            return alone(hidden, *arguments, **options)
        self._refresh(followers, place)
        keeps = torch.is_grad_enabled() and (hidden.requires_grad or bool(layer.parameters))
        self._cells += keeps
        command = Command(
            "forward",
            place,
            self._cells if keeps else 0,
            needs_gradient=hidden.requires_grad,
            trains=layer.layer.training,
        )
        if keeps:
            return _Cell.apply(self, followers, command, hidden, *layer.parameters)  # type: ignore[no-untyped-call]
        return self.forward(followers, command, hidden)

    def _refresh(self, followers: Followers, place: int) -> None:
        memory = self._layers[place].placed
        what = memory.outdated
        if what is not Outdated.none:
            followers.send(Command("refresh", place, what))
            with followers.together():
                memory.refresh(what)

    def forward(self, followers: Followers, command: Command, hidden: Tensor) -> Tensor:
        """Return the whole output of a layer, which all ranks compute."""
        output: Tensor = self._together(followers, command, hidden, self._forward)
        return output

    def backward(self, followers: Followers, command: Command, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradient of a layer's input, if it is needed, and the gradients of its parameters."""
        if self._layers[command.layer].recomputes:
            self._refresh(followers, command.layer)
        found: list[Tensor | None] = self._together(followers, command, gradient, self._backward)
        return found

    def _together(
        self, followers: Followers, command: Command, given: Tensor, run: Callable[[Command, Tensor], Any]
    ) -> Any:
        known = self._known.get(command.kind)
        is_known = known is not None and (
            known[0].data_ptr() == given.data_ptr()
            and (known[0].shape, known[0].dtype) == (given.shape, given.dtype)
            and known[1] == given._version  # noqa: SLF001 - no public name
        )
        while self._discarded:
            place, cell = self._discarded.popleft()
            self._layers[place].discard(cell)
            followers.send(Command("discard", place, cell))
        followers.send(command._replace(is_known=is_known, number_type=_DTYPES.index(given.dtype)))
        with followers.together():
            if not is_known:
                given = given.detach().contiguous()
                distributed.broadcast(given, 0, group=self._mesh.get_group())
            return run(command, given)

    def dropping(self, command: Command) -> Callable[[], object]:
        """Return a function that tells all ranks to drop a forward pass, because no backward pass will come."""
        return partial(self._discarded.append, (command.layer, command.cell))

    # -- all ranks ---------------------------------------------------------------------------------------------------

    def follow(self, command: Command) -> None:
        """Carry out a command of the first rank."""
        layer = self._layers[command.layer]
        if command.kind == "discard":
            layer.discard(command.cell)
            return
        if command.kind == "refresh":
            layer.placed.refresh(Outdated(command.cell))
            return
        if command.is_known:
            given = self._known[command.kind][0]
        else:
            like = layer.entering if command.kind == "forward" else layer.leaving
            dtype = _DTYPES[command.number_type]
            given = torch.empty(like.shape, dtype=dtype, device=self._mesh.device_type)
            distributed.broadcast(given, 0, group=self._mesh.get_group())
        (self._forward if command.kind == "forward" else self._backward)(command, given)

    def _forward(self, command: Command, hidden: Tensor) -> Tensor:
        return self._keep("forward", self._layers[command.layer].forward(command, hidden))

    def _backward(self, command: Command, gradient: Tensor) -> list[Tensor | None]:
        reached, *gradients = self._layers[command.layer].backward(command.cell, gradient)
        return [None if reached is None else self._keep("backward", reached), *gradients]

    def _keep(self, kind: str, tensor: Tensor) -> Tensor:
        # Autograd makes the tensor refer to this stage; the detached one has the same memory and version.
        self._known[kind] = tensor.detach(), tensor._version  # noqa: SLF001 - no public name
        return tensor


class _Cell(torch.autograd.Function):
    """A layer's forward and backward pass on all ranks, as one node of the first rank's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, stage: DividedStage, followers: Followers, command: Command, hidden: Tensor, *_: Tensor
    ) -> Tensor:
        output = stage.forward(followers, command, hidden)
        ctx.pass_, ctx.run = _Pass(), (stage, followers, command)
        ctx.dropped = weakref.finalize(ctx.pass_, stage.dropping(command))
        ctx.dropped.atexit = False
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stage, followers, command = ctx.run
        ctx.dropped.detach()
        return None, None, None, *stage.backward(followers, command._replace(kind="backward"), gradients[0])


class _Pass:
    """Object with the lifetime of the autograd graph of a forward pass."""


class _Recorded(Exception):
    """The last layer was called."""


def _recorded_calls(stage: Stage, sample: Tensor) -> dict[int, Call]:
    """Return the arguments with which the stage calls its layers for a microbatch, by index of the layer."""
    calls: dict[int, Call] = {}
    last = max(stage.layers)

    def note(place: int, _: nn.Module, arguments: Any, options: Any) -> None:
        calls[place] = arguments, options
        if place == last:
            raise _Recorded

    with ExitStack() as hooks, torch.no_grad(), suppress(_Recorded):
        for place, layer in stage.layers.items():
            hook = layer.register_forward_pre_hook(partial(note, place), with_kwargs=True)
            hooks.callback(hook.remove)
        stage.prepare_cell(0, 0, 0)
        stage.compute(sample)  # layers are traced in float32
    return calls


def _sample(stage: Stage, blueprint: Blueprint, batch: int, length: int) -> Tensor:
    """Return an input of the stage for a microbatch, of zeros."""
    device = next(stage.module.parameters(), torch.empty(0)).device
    return _blank_sample(stage, blueprint, batch, length).to(device)


def _blank_sample(stage: Stage, blueprint: Blueprint, batch: int, length: int) -> Tensor:
    shard, objective = stage.shard, blueprint.objective
    if not shard.is_first:
        shape = boundary_shape(blueprint, shard.start, batch, length)
        if shape is None:
            raise UserError(
                f"parallelism.tensor: the model does not say how many numbers pass layer {shard.start}",
                hint="set parallelism.tensor to 1",
            )
        return torch.zeros(shape)
    if blueprint.classifies_images:
        return torch.zeros(batch, *blueprint.sample_shape)
    if blueprint.config is None:
        dtype = torch.int64 if objective.reads_text else torch.float32
        return torch.zeros(batch, *blueprint.sample_shape, dtype=dtype)
    texts = (2,) if objective.task == "embedding" else ()
    return torch.zeros(batch, *texts, length, dtype=torch.int64)


def _kinds(stage: Stage, blueprint: Blueprint) -> dict[int, int]:
    """Return, for each layer, the first layer that is like it."""
    places = list(stage.layers)
    if blueprint.config is None:
        return {place: place for place in places}
    from share_compute.models.huggingface.layer_calls import first_alike  # noqa: PLC0415 - slow to import

    return {
        place: places[first]
        for place, first in zip(places, first_alike(list(stage.layers.values()), None), strict=True)
    }


def _are_equal(one: Call, other: Call) -> bool:
    fixed, tensors = _leaves(*one)
    others_fixed, others = _leaves(*other)
    shapes = [each.shape for each in tensors]
    # Hidden states, the first argument, may have other values.
    return (fixed, shapes) == (others_fixed, [each.shape for each in others]) and all(
        map(torch.equal, tensors[1:], others[1:])
    )


def _recipe(layer: nn.Module, call: Call, mesh: DeviceMesh, operators: OperatorsSpec) -> _Recipe | str:
    """Return how the ranks divide a layer, or why they cannot."""
    found = planned(layer, call, mesh.size(), operators)
    if isinstance(found, str):
        return found
    return _Recipe(ShardedLayer(empty_copy(layer), *call, found.plan, mesh), found.plan, found.leaving)
