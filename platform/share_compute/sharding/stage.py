"""A stage whose layers several ranks compute together, led by the first rank.

The first rank runs the model's own code, with the layers replaced. The other ranks follow its commands: each runs its
part of a layer forward, and later backward. All ranks map the same memory, which holds the parameters of these layers
and their gradients. So neither updates by the first rank nor gradients need a transfer.
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
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_flatten

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.boundary import boundary_shape
from share_compute.models.stage import Stage
from share_compute.planning.operators.plan import LayerOperators
from share_compute.sharding.execution import ShardedLayer
from share_compute.sharding.layer_plans import Call, empty_copy, planned, undivided
from share_compute.specification.placement.operators import NO_STRATEGIES, OperatorsSpec

_Kind = Literal["forward", "backward", "discard"]
_KINDS: tuple[_Kind, ...] = get_args(_Kind)
_FIELDS = Struct("<BIQ???")


class Command(NamedTuple):
    """Command of the first rank to the other ranks."""

    kind: _Kind
    layer: int = 0
    """Index of the layer in the whole model."""
    cell: int = 0
    """Number of a forward pass of a layer; 0 if no backward pass follows."""
    is_known: bool = False
    """Whether the tensor is the result of the previous command of this kind, which each rank has."""
    needs_gradient: bool = False
    """Whether the input of the forward pass needs a gradient."""
    trains: bool = False
    """Whether the layer is in its training mode."""

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

    def wait(self) -> None:
        """Wait until all other ranks have carried out the last command."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which all ranks compute; it translates their failures."""


class DividedLayer:
    """This rank's part of one layer.

    Args:
        layer: the whole layer.
        sharded: the layer's graph and plan, with parameters on the meta device.
        call: arguments of the calls that are divided.
        leaving: output of such a call, on the meta device.
        recomputes: whether the backward pass computes the forward pass again.
    """

    def __init__(
        self, layer: nn.Module, sharded: ShardedLayer, call: Call, leaving: Tensor, *, recomputes: bool
    ) -> None:
        self.layer = layer
        self.leaving = leaving
        (self.entering, *self._arguments), self._options = call
        self._fixed, self._tensors = _leaves(self._arguments, self._options)
        self._sharded = sharded
        self._recomputes = recomputes
        self._open: dict[int, tuple[Tensor, Tensor | None]] = {}
        """Input and output of this rank's autograd graph, by cell; the output is None if it is recomputed."""
        self.parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        """Trained parameters of the whole layer."""
        self._trained: list[nn.Parameter] = []
        """The same parameters as this rank has them."""
        self.gradients: list[Tensor] = []
        """Gradients of all of them in shared memory, which the next `backward` overwrites."""

    @property
    def numbers(self) -> int:
        """Size of the shared memory that the layer needs, in float32 numbers."""
        parameters = list(self.layer.parameters())
        return sum(each.numel() * (2 if each.requires_grad else 1) for each in parameters)

    def place(self, memory: Tensor) -> None:
        """Move the parameters into shared memory, with the values of the first rank.

        Args:
            memory: ``[numbers]``.
        """
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.layer.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        taken = 0

        def take(like: Tensor) -> Tensor:
            nonlocal taken
            taken += like.numel()
            return memory[taken - like.numel() : taken].view(like.shape)

        for parameter, own in names.items():
            shared = take(parameter)
            cut = self._sharded.layer.get_parameter(own[0])
            assert isinstance(cut, DTensor)
            mesh, placements = cut.device_mesh, cut.placements
            if mesh.get_local_rank() == 0:
                shared.copy_(parameter.detach())
            parameter.data = shared
            local = _part(parameter.detach(), placements[0], mesh)
            placed = nn.Parameter(
                DTensor.from_local(
                    local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
                ),
                requires_grad=parameter.requires_grad,
            )
            for name in own:
                path, _, leaf = name.rpartition(".")
                setattr(self._sharded.layer.get_submodule(path), leaf, placed)
            if parameter.requires_grad:
                self._trained.append(placed)
                self.gradients.append(take(parameter))

    def fits(self, hidden: Tensor, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        """Return whether a call has the arguments that the layer was divided for; hidden states may differ."""
        if hidden.shape != self.entering.shape or set(options) != set(self._options):
            return False
        fixed, tensors = _leaves(arguments, {name: options[name] for name in self._options})
        return fixed == self._fixed and all(map(torch.equal, tensors, self._tensors))

    def forward(self, command: Command, hidden: Tensor) -> Tensor:
        """Return the whole output for a whole input, and keep the tensors that the backward pass needs."""
        self._sharded.train(command.trains)
        leaf = hidden.detach().requires_grad_(command.needs_gradient)
        with torch.set_grad_enabled(bool(command.cell) and not self._recomputes):
            output = self._computed(leaf)
        if command.cell:
            self._open[command.cell] = leaf, None if self._recomputes else output
        return output.detach()

    def _computed(self, hidden: Tensor) -> Tensor:
        output: Tensor = self._sharded(hidden, *self._arguments, **self._options)
        return output

    def backward(self, cell: int, gradient: Tensor) -> Tensor | None:
        """Write this rank's part of the parameters' gradients; return the gradient of the input, if it is needed."""
        leaf, output = self._open.pop(cell)
        if output is None:
            with torch.enable_grad():
                output = self._computed(leaf)
        inputs = [*([leaf] if leaf.requires_grad else []), *self._trained]
        found = list(torch.autograd.grad(output, inputs, gradient, allow_unused=True))
        reached = found.pop(0) if leaf.requires_grad else None
        for cut, own, whole in zip(self._trained, found, self.gradients, strict=True):
            assert isinstance(cut, DTensor)
            (placement,), mesh = cut.placements, cut.device_mesh
            if isinstance(placement, Replicate) and mesh.get_local_rank() > 0:
                continue  # the first rank has it, too
            part = _part(whole, placement, mesh)
            if own is None:
                part.zero_()
            else:
                assert isinstance(own, DTensor)
                part.copy_(own.to_local())
        return reached

    def discard(self, cell: int) -> None:
        """Drop the tensors kept for a backward pass that will not run."""
        self._open.pop(cell, None)


def _leaves(arguments: Sequence[Any], options: Mapping[str, Any]) -> tuple[list[Any], list[Tensor]]:
    """Return the tensors among some values, and the values with None in place of the tensors."""
    leaves, structure = tree_flatten((list(arguments), dict(options)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [*(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), structure], tensors


def _part(whole: Tensor, placement: Any, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of a tensor, as a view."""
    if isinstance(placement, Shard):
        return whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
    return whole


class _Recipe(NamedTuple):
    """Result of planning a layer."""

    sharded: ShardedLayer
    plan: LayerOperators
    leaving: Tensor
    """Output of the layer, on the meta device."""


class DividedStage:
    """The layers of a stage, divided between the ranks of a mesh.

    All ranks make this object with equal arguments. Then they call `place`. The first rank calls `lead`, and the others
    call `follow` for each command.

    Args:
        stage: the stage. Ranks other than the first later use only its layers.
        blueprint: blueprint of the whole model.
        batch: samples in a microbatch.
        length: tokens of a sample, for texts.
        mesh: the ranks, in one dimension.
        operators: how operators are divided.

    Raises:
        UserError: no layer of the stage with parameters can be divided, the precision is not float32, or a given
            strategy is not legal.
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
        if blueprint.precision != "float32":
            raise UserError(
                f"parallelism.tensor: ranks compute in float32, not in {blueprint.precision}",
                hint="set training.precision to float32",
            )
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
            self._layers[place] = DividedLayer(
                layer, sharded, call, recipe.leaving, recomputes=blueprint.activation_checkpointing
            )
        self._require_some(stage)
        self._known: dict[str, tuple[Tensor, int]] = {}
        """Last result of each kind of command, and its version."""
        self._cells = 0

    def _require_some(self, stage: Stage) -> None:
        for place, layer in stage.layers.items():
            if not self._layers and any(True for _ in layer.parameters()):
                raise undivided(stage.shard, self._mesh.size(), place, self.whole[place])

    @property
    def numbers(self) -> int:
        """Size of the shared memory, in float32 numbers."""
        return sum(layer.numbers for layer in self._layers.values())

    def place(self, memory: Tensor) -> None:
        """Move the parameters of the divided layers into shared memory, with the values of the first rank.

        Args:
            memory: ``[numbers]``, mapped by all ranks.
        """
        for layer in self._layers.values():
            layer.place(memory[: layer.numbers])
            memory = memory[layer.numbers :]

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

    def forward(self, followers: Followers, command: Command, hidden: Tensor) -> Tensor:
        """Return the whole output of a layer, which all ranks compute."""
        output: Tensor = self._together(followers, command, hidden, self._forward)
        if not command.cell:
            followers.wait()  # until no rank reads the parameters
        return output

    def backward(self, followers: Followers, command: Command, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradient of a layer's input, if it is needed, and the gradients of its parameters."""
        reached = self._together(followers, command, gradient, self._backward)
        followers.wait()  # wait until each rank has written its parts of the gradients
        return [reached, *self._layers[command.layer].gradients]

    def _together(
        self, followers: Followers, command: Command, given: Tensor, run: Callable[[Command, Tensor], Any]
    ) -> Any:
        known = self._known.get(command.kind)
        is_known = known is not None and (
            known[0].data_ptr() == given.data_ptr()
            and known[0].shape == given.shape
            and known[1] == given._version  # noqa: SLF001 - no public name
        )
        while self._discarded:
            place, cell = self._discarded.popleft()
            self._layers[place].discard(cell)
            followers.send(Command("discard", place, cell))
        followers.send(command._replace(is_known=is_known))
        with followers.together():
            if not is_known:
                given = given.detach().contiguous()
                distributed.broadcast(given, 0, group=self._mesh.get_group())
            return run(command, given)

    def dropping(self, command: Command) -> Callable[[], object]:
        """Return a function that tells all ranks to drop a forward pass, because no backward pass will come."""
        return partial(self._discarded.append, (command.layer, command.cell))

    # -- all ranks ---------------------------------------------------------------------------------------------------

    def follow(self, command: Command) -> bool:
        """Carry out a command of the first rank; return whether the first rank waits for its end."""
        layer = self._layers[command.layer]
        if command.kind == "discard":
            layer.discard(command.cell)
            return False
        if command.is_known:
            given = self._known[command.kind][0]
        else:
            like = layer.entering if command.kind == "forward" else layer.leaving
            given = torch.empty(like.shape, dtype=like.dtype, device=self._mesh.device_type)
            distributed.broadcast(given, 0, group=self._mesh.get_group())
        (self._forward if command.kind == "forward" else self._backward)(command, given)
        return command.kind == "backward" or not command.cell

    def _forward(self, command: Command, hidden: Tensor) -> Tensor:
        return self._keep("forward", self._layers[command.layer].forward(command, hidden))

    def _backward(self, command: Command, gradient: Tensor) -> Tensor | None:
        reached = self._layers[command.layer].backward(command.cell, gradient)
        return None if reached is None else self._keep("backward", reached)

    def _keep(self, kind: str, tensor: Tensor) -> Tensor:
        self._known[kind] = tensor, tensor._version  # noqa: SLF001 - no public name
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
        stage.forward(sample)
    return calls


def _sample(stage: Stage, blueprint: Blueprint, batch: int, length: int) -> Tensor:
    """Return an input of the stage for a microbatch, of zeros."""
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
