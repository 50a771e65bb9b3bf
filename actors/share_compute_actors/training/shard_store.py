"""The shard store: an actor on the head that serves samples and starting weights, and writes checkpoints and results.

Members may be on machines without access to the server's disk, so this actor reads and writes files for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from share_compute.data import PreparedData, Split, StepOrder
from share_compute.data.order import evaluated_range, task_samples
from share_compute.data.samples import SPLITS
from share_compute.data.several_tasks import (
    described_tasks,
    digest_of,
    notes_of,
    objectives_of,
    prepared_tasks,
)
from share_compute.data.tokenization import load_tokenizer
from share_compute.errors import UserError, VerificationFailed
from share_compute.lifecycle.attempt_events import Assignment
from share_compute.models.blueprint import Blueprint, TaskHead, blueprint_of
from share_compute.models.configuration import declared_config
from share_compute.models.export import adapter_description
from share_compute.models.huggingface.encoder_types import Pooling, described_pooling, trained_pooling
from share_compute.models.image_types import image_processor
from share_compute.models.objective import Objective, task_of
from share_compute.models.storage.checkpoints import STATE, Chosen, newest_whole
from share_compute.models.storage.checksums import damage
from share_compute.models.storage.weights import FolderWriter, WeightFolder, prune_folders, sweep_partial
from share_compute.specification import LayerSpec
from share_compute.specification.boundaries import (
    FixedBoundaryCompressionSpec,
    PlannedBoundaryCompressionSpec,
)
from share_compute.training.loss_scale import LossScale, first_loss_scale
from share_compute.training.metrics import Figures
from share_compute_actors.group.answering import answered, answers
from share_compute_actors.machine.stalled import close_stalled_connections
from share_compute_actors.messages import FolderKind, read_extents
from share_compute_actors.training.model_checks import check_model
from share_compute_actors.transport.pieces import PIECE, Piece, take_all
from share_compute_actors.unpickling import refuse_pickles
from share_compute_actors.wire import NAMES, NOTHING, TEXT, Schema, Undeclared

if TYPE_CHECKING:
    from share_compute.models.huggingface.conversion import PretrainedWeights

ShardPart: TypeAlias = Literal["inputs", "targets"]
Rows: TypeAlias = dict[int, NDArray[Any]]
"""Inputs or targets of each microbatch's samples, by microbatch id; each array is ``[samples, ...]``."""
_DEATHS = (RayActorError, ObjectLostError)
"""Ray errors for a member that died before its answer arrived."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Training state after a step, without weights and optimizer state."""

    step: int
    """Last committed step; 0 before the first."""
    loss_scale: LossScale
    """Loss scale of the next step."""
    validations: tuple[tuple[int, Figures], ...] = ()
    """Step and metrics of each validation so far."""
    test: Figures | None = None
    """Metrics of the final test, with its loss as ``validation_loss``; None before it."""


@dataclass(frozen=True, slots=True)
class ShardStoreFacts:
    """Facts that the coordinator gets from the shard store before it plans."""

    blueprint: Blueprint
    sizes: dict[str, int]
    """Number of samples, by split."""
    state: TrainingState
    """Training state in the checkpoint, or at the start of the job."""
    has_weights: bool
    """Whether training starts from a checkpoint or a pretrained model instead of randomly initialized weights."""
    microbatches: int | None
    """Number of microbatches in a batch, from the specification or the checkpoint; None lets the planner choose it.

    Each slice of a sequence counts as one."""
    runs: tuple[int, ...] | None
    """`SummationTree.runs` from the checkpoint; None if it has none, or if their sum is not `microbatches`."""
    notes: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...] = ()
    """Token ids of the prompts for sample texts, ``[prompts][tokens]``; empty without sample texts or tokenizer."""
    text_ends: tuple[int, ...] = ()
    """Token ids that end a sample text."""
    version: int | None = None
    """Number of merges that the weights include; None unless the attempt trains a branch."""
    boundaries: FixedBoundaryCompressionSpec | None = None
    """Compression at the boundaries between stages from the checkpoint; None lets the first plan fix it."""
    data: str | None = None
    """`PreparedData.digest`; of several tasks, the digest of theirs."""
    task_sizes: tuple[dict[str, int], ...] = ()
    """Number of samples of each task, by split; `sizes` are their sums."""
    class_names: tuple[tuple[str, ...] | None, ...] = ()
    """`PreparedData.class_names` of each task."""

    @property
    def first_step(self) -> int:
        """Step after `state`. The attempt begins with this step unless it takes over members."""
        return self.state.step + 1


@dataclass(frozen=True, slots=True)
class Saved:
    """The outcome of saving a folder."""

    size_bytes: int | None
    """Size of the folder in bytes; None if it was not saved, because data of a member was missing or malformed."""
    culprit: int | None = None
    """Index in ``members`` of `ShardStore.save` of the member with malformed data; None if there is none."""
    fault: str = ""
    """Defect of the malformed data, for the user; empty if there is no malformed data."""


FACTS: Schema[ShardStoreFacts] = Schema(ShardStoreFacts)
SAVED: Schema[Saved] = Schema(Saved)
STATE_OF_TRAINING: Schema[TrainingState] = Schema(TrainingState)
PROGRESS: Schema[tuple[str, float]] = Schema(tuple[str, float])


# `max_task_retries`: Ray repeats calls whose connection broke.
@ray.remote(
    num_cpus=0,
    max_task_retries=-1,
    concurrency_groups={"control": 1, "serve": 4, "weights": 1, "saving": 1},
)
class ShardStore:
    """The shard store of one attempt: serves samples and weights, and writes checkpoints and results.

    Args:
        assignment: an `Assignment` as JSON.
    """

    def __init__(self, assignment: str) -> None:
        refuse_pickles()
        close_stalled_connections()
        self._assignment = Assignment.model_validate_json(assignment)
        self._spec = self._assignment.spec
        self._progress = ("", 0.0)
        self._prepared: tuple[PreparedData, ...] = ()
        """Data of each task, in the order of the tasks."""
        self._orders: tuple[StepOrder, ...] = ()
        """Order of the training samples; of several tasks, of each task's microbatches."""
        self._weights: WeightFolder | PretrainedWeights | None = None
        self._optimizer: WeightFolder | None = None
        self._update: WeightFolder | None = None
        self._version: int | None = None
        self._microbatches = self._spec.training.microbatches
        self._slices = self._spec.parallelism.sequence
        self._runs: tuple[int, ...] | None = None
        self._boundaries: FixedBoundaryCompressionSpec | None = None
        self._state = TrainingState(0, first_loss_scale(self._spec.training.precision))
        self._config: dict[str, Any] | None = None
        self._layers: tuple[LayerSpec, ...] = ()
        self._heads: tuple[TaskHead, ...] = ()
        self._objective = Objective()
        self._pooling: Pooling | None = None
        self._tokenizer: Any = None

    # -- before training -----------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    @answers(PROGRESS)
    def progress(self) -> tuple[str, float]:
        """Return a text about the present work of `prepare`, and the fraction of this work that is done, 0 to 1."""
        return self._progress

    @answers(FACTS)
    def prepare(self) -> ShardStoreFacts:
        """Read and tokenize the data, open the weights and resolve the model's configuration; return the facts."""

        def note(what: str, share: float) -> None:
            self._progress = (what, share)

        sweep_partial(self._assignment.folder)
        branch = self._assignment.branch
        folder = self._assignment.folder / "data" if branch is None else branch.data
        self._prepared = prepared_tasks(self._spec, folder, note)
        prepared = self._prepared[0]
        checkpoint, notes = self._checkpoint()
        self._orders = self._step_orders()
        if checkpoint is not None:
            self._continue_from(checkpoint)
            self._weights = WeightFolder(checkpoint)
            if any(checkpoint.glob("optimizer*.safetensors")):
                self._optimizer = WeightFolder(checkpoint, "optimizer")
        model = self._spec.model
        if self._spec.data.pairs is not None and model.layers is None:
            self._pooling = trained_pooling(model.path, declared_config(model))
        blueprint = blueprint_of(
            self._spec,
            prepared.vocab_size,
            self._special_tokens(prepared.tokenizer_folder),
            objective=prepared.objective,
            sample_shape=prepared.sample_shape,
            classes=(prepared.description or {}).get("classes"),
            objectives=objectives_of(self._spec, self._prepared) if self._spec.tasks else None,
            pooling="mean" if self._pooling is None else self._pooling.mode,
        )
        notes = (*notes, *check_model(self._spec, blueprint, self._prepared))
        self._config, self._layers = blueprint.config, blueprint.layers
        self._objective, self._heads = blueprint.whole_objective, blueprint.heads
        if checkpoint is None and self._spec.model.path is not None:
            from share_compute.models.huggingface.conversion import pretrained_weights  # noqa: PLC0415 - slow to import

            self._weights = pretrained_weights(self._spec.model.path, blueprint)
            if self._weights.added:
                notes = (*notes, "the model's head is new: its folder has none for the classes of the data")
        task_sizes = tuple(
            {str(split): own.samples.size(split) for split in SPLITS} for own in self._prepared
        )
        return ShardStoreFacts(
            blueprint=blueprint,
            sizes={split: sum(sizes[split] for sizes in task_sizes) for split in SPLITS},
            task_sizes=task_sizes,
            class_names=tuple(own.class_names for own in self._prepared),
            state=self._state,
            has_weights=self._weights is not None,
            microbatches=None if self._microbatches is None else self._microbatches * self._slices,
            runs=self._runs,
            boundaries=self._boundaries,
            notes=(*notes, *notes_of(self._spec, self._prepared)),
            prompts=self._prompts(prepared.tokenizer_folder),
            text_ends=self._text_ends(),
            version=self._version,
            data=digest_of(self._prepared),
        )

    def _step_orders(self) -> tuple[StepOrder, ...]:
        """Return the order of the attempt's samples; with several tasks, the order for each task's microbatches."""
        training, branch = self._spec.training, self._assignment.branch
        sizes = [own.samples.size("train") for own in self._prepared]
        if len(sizes) > 1:
            return tuple(
                StepOrder(training.seed, size, training.microbatch_size, single.data.shuffle)
                for size, single in zip(sizes, self._spec.single_tasks, strict=True)
            )
        order = StepOrder(training.seed, sizes[0], training.batch_size, self._spec.data.shuffle)
        if branch is None:
            return (order,)
        policy = training.rounds
        assert policy is not None, "the job has no branches"
        return (replace(order, branches=policy.branches, branch=branch.number),)

    def _checkpoint(self) -> Chosen:
        wanted = self._assignment.checkpoint
        chosen = Chosen(None, ())
        if wanted is not None:
            self._progress = ("looking whether the checkpoint is whole", 0.0)
            chosen = newest_whole(wanted)
        if self._assignment.branch is not None and chosen.folder is None:
            raise UserError(
                f"there are no weights with which branch {self._assignment.branch.number} can begin",
                hint="resume the job to begin with its last version or its first step",
            )
        return chosen

    def _prompts(self, folder: Path | None) -> tuple[tuple[int, ...], ...]:
        wanted = self._spec.training.samples
        if wanted is None or folder is None:
            return ()
        self._tokenizer = load_tokenizer(folder)
        rows = tuple(tuple(self._tokenizer(prompt).input_ids) for prompt in wanted.prompts)
        for prompt, row in zip(wanted.prompts, rows, strict=True):
            if not row:
                raise UserError(
                    f"training.samples: the tokenizer has no tokens for the prompt {prompt!r}",
                    hint="choose another prompt",
                )
        return rows

    def _text_ends(self) -> tuple[int, ...]:
        end = self._tokenizer.eos_token_id if self._tokenizer is not None else None
        return () if end is None else (end,)

    def _continue_from(self, checkpoint: Path) -> None:
        state = json.loads((checkpoint / STATE).read_text())
        require_unchanged(state, self._train_samples, digest_of(self._prepared))
        if self._assignment.branch is not None:
            self._version = int(state.get("version", self._assignment.branch.version))
        # A job never changes its number of microbatches, because the order of additions depends on this number.
        self._microbatches = self._microbatches or state.get("microbatches")
        if sum(state.get("runs", ())) == (self._microbatches or 0) * self._slices:
            self._runs = tuple(state["runs"])
        is_planned = isinstance(self._spec.training.boundary_compression, PlannedBoundaryCompressionSpec)
        if is_planned and state.get("boundaries") is not None:
            self._boundaries = FixedBoundaryCompressionSpec.model_validate(state["boundaries"])
        branch = self._assignment.branch
        self._state = TrainingState(
            int(state["step"]) if branch is None or branch.step is None else branch.step,
            LossScale(**state["loss_scale"]) if "loss_scale" in state else self._state.loss_scale,
            # Checkpoints of version 0.2 store only the loss of a validation.
            tuple(
                (int(step), figures if isinstance(figures, dict) else {"validation_loss": float(figures)})
                for step, figures in state.get("validations", ())
            ),
        )

    @property
    def _train_samples(self) -> int:
        return sum(own.samples.size("train") for own in self._prepared)

    @answers(NOTHING)
    def cut(self, runs: Sequence[int], boundaries: Mapping[str, Any] | None = None) -> None:
        """Set what the first plan of the job fixed.

        Args:
            runs: `SummationTree.runs`; their sum is the number of microbatches in a batch.
            boundaries: compression at the boundaries between stages, as JSON; None for no compression.
        """
        self._spec = self._spec.with_microbatches(sum(runs))
        self._runs = tuple(runs)
        if boundaries is not None:
            self._boundaries = FixedBoundaryCompressionSpec.model_validate(boundaries)

    def _special_tokens(self, tokenizer: Path | None) -> dict[str, int | None]:
        """Return the ids of special tokens by name, from the job's model configuration, else from the tokenizer.

        Return an empty dictionary if the job has no model configuration or no tokenizer.
        """
        if self._spec.model.config is None or tokenizer is None:
            return {}
        loaded, given = load_tokenizer(tokenizer), self._spec.model.config
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {name: given.get(name, getattr(loaded, name)) for name in names}

    # -- while members load and train ----------------------------------------------------------------------------

    @ray.method(concurrency_group="serve")
    def train_rows(self, step: int, microbatches: Sequence[int], part: ShardPart) -> Rows:
        """Return the inputs or the targets of some microbatches of a training step, by microbatch id."""
        size, tasks = self._spec.training.microbatch_size, len(self._prepared)
        if tasks == 1:
            chosen = self._orders[0].indices(step)
            return {
                microbatch: self._take(
                    "train", chosen[microbatch * size : (microbatch + 1) * size], part, 0, step
                )
                for microbatch in microbatches
            }
        count = self._spec.training.batch_size // size
        return {
            microbatch: self._take(
                "train",
                task_samples(self._orders, count, step, microbatch),
                part,
                task_of(microbatch, tasks),
                step,
            )
            for microbatch in microbatches
        }

    @ray.method(concurrency_group="serve")
    def evaluation_rows(
        self, split: Literal["validation", "test"], microbatches: Sequence[int], part: ShardPart
    ) -> Rows:
        """Return the inputs or the targets of some microbatches of an evaluation split, by microbatch id.

        The last microbatch of each task may have fewer samples than the others; see `evaluation_starts`.
        """
        sizes = [own.samples.size(split) for own in self._prepared]
        found: Rows = {}
        for microbatch in microbatches:
            task, samples = evaluated_range(sizes, self._spec.training.microbatch_size, microbatch)
            found[microbatch] = self._take(split, np.arange(samples.start, samples.stop), part, task)
        return found

    def _take(
        self, split: Split, indices: NDArray[np.int64], part: ShardPart, task: int, step: int = 0
    ) -> NDArray[Any]:
        prepared = self._prepared[task]
        if part == "targets":
            return prepared.samples.take(split, indices)[1]
        return prepared.take(split, indices, step)[0]

    @ray.method(concurrency_group="weights")
    def weights(self, extents: bytes) -> list[Piece]:
        """Return rows of the starting weights as float32, one piece per extent (see `pack_extents`)."""
        assert self._weights is not None
        return [
            Piece.of_rows(extent.name, self._weights.read(*extent).float())
            for extent in read_extents(extents)
        ]

    @ray.method(concurrency_group="weights")
    def optimizer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the optimizer's tensors in the checkpoint, by name; empty if there are none."""
        return self._optimizer.shapes() if self._optimizer is not None else {}

    @ray.method(concurrency_group="weights")
    def optimizer_state(self, extents: bytes) -> list[Piece]:
        """Return rows of the optimizer's tensors as float32, one piece per extent (see `pack_extents`)."""
        assert self._optimizer is not None
        return [
            Piece.of_rows(extent.name, self._optimizer.read(*extent).float())
            for extent in read_extents(extents)
        ]

    @ray.method(concurrency_group="weights")
    @answers(NAMES)
    def inventory(self) -> tuple[str, ...]:
        """Return the stored names of all parameters and buffers that training starts from."""
        assert self._weights is not None
        return tuple(self._weights.names())

    @ray.method(concurrency_group="weights")
    def loss_scale(self) -> LossScale:
        """Return the loss scale in the checkpoint, or at the start of the job."""
        return self._state.loss_scale

    @ray.method(concurrency_group="weights")
    @answers(NOTHING)
    def use_update(self, folder: str) -> None:
        """Open the folder of an update, which `update` then serves; this closes the previous folder.

        Args:
            folder: folder with a payload for each trained parameter, uint8 tensors in ``model*.safetensors``; an
                absolute path, or relative to the folder of the attempt.

        Raises:
            UserError: the folder has no update.
            VerificationFailed: a file of the folder is damaged.
        """
        place = self._assignment.folder / folder
        fault = damage(place)
        if fault is not None:
            raise VerificationFailed(
                f"the update of a merge cannot be used: {fault}", hint="check the disk of the server"
            )
        self._update = WeightFolder(place)

    @ray.method(concurrency_group="weights")
    def update_bytes(self) -> dict[str, int]:
        """Return the size of each payload of the open update, by the parameter's stored name."""
        assert self._update is not None
        return {name: math.prod(shape) for name, shape in self._update.shapes().items()}

    @ray.method(concurrency_group="weights")
    def update(self, extents: bytes) -> list[Piece]:
        """Return bytes of the payloads of the open update, one piece per extent (see `pack_extents`)."""
        assert self._update is not None
        return [Piece.of_rows(extent.name, self._update.read(*extent)) for extent in read_extents(extents)]

    @ray.method(concurrency_group="serve")
    @answers(TEXT)
    def text(self, ids: Sequence[int]) -> str:
        """Decode token ids, and return the text."""
        text: str = self._tokenizer.decode(ids)
        return text

    # -- results -------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="saving")
    @answers(SAVED)
    def save(
        self, folder: str, kind: FolderKind, state: bytes, machines: Sequence[str], *members: Any
    ) -> Saved:
        """Fetch the members' snapshots and write them to a folder, which becomes visible only when it is complete.

        If a member is lost or sends malformed data, no folder is written.

        Args:
            folder: path of the folder, relative to the job's folder.
            kind: whether the folder is a checkpoint, an artifact, or a contribution, which has only payloads.
            state: training state at the time of the snapshots, a packed `TrainingState`.
            machines: names of the machines that have a snapshot, in their order.
            members: members on these machines, in the same order.

        Raises:
            Unavailable: the disk is full or cannot be written.
            ContributorLost: a piece arrived damaged in every attempt.
        """
        writer = FolderWriter(self._assignment.folder / folder)
        place = 0
        try:
            self._describe(writer, kind, STATE_OF_TRAINING.unpack(state, "the coordinator"))
            for place, (machine, member) in enumerate(zip(machines, members, strict=True)):
                take_all(machine, place, partial(_piece, member, machine), writer.write)
            size_bytes = writer.finish()
        except BaseException as failure:
            writer.discard()
            _release_snapshots(members)
            if isinstance(failure, _DEATHS):
                return Saved(None)
            if isinstance(failure, (Undeclared, RayError)):
                return Saved(None, place, getattr(failure, "message", type(failure).__name__))
            raise
        if kind == "checkpoint":
            prune_folders(writer.target.parent, self._spec.training.checkpoints_kept)
        return Saved(size_bytes)

    def _describe(self, writer: FolderWriter, kind: FolderKind, state: TrainingState) -> None:
        """Write the files of a folder that are not written from snapshots, such as the model's configuration."""
        prepared = self._prepared[0]
        facts = {
            **asdict(state),
            "job": self._assignment.job_id,
            "seed": self._spec.training.seed,
            "batch_size": self._spec.training.batch_size,
            "train_samples": self._train_samples,
            "data": digest_of(self._prepared),
            "microbatches": self._spec.training.microbatches,
            "runs": self._runs,
            "boundaries": None if self._boundaries is None else self._boundaries.model_dump(mode="json"),
        }
        writer.write_json(STATE, facts)
        if kind == "contribution":
            return
        if self._config is not None:
            self._describe_model(writer, self._config, kind)
        else:
            writer.write_json("layers.json", [layer.model_dump(exclude_none=True) for layer in self._layers])
        if prepared.tokenizer_folder is not None:
            writer.copy(file for file in prepared.tokenizer_folder.iterdir() if file.is_file())
        if self._heads:
            writer.write_json("tasks.json", described_tasks(self._heads, self._prepared))
        elif prepared.description is not None:
            writer.write_json("data.json", prepared.description)

    def _describe_model(self, writer: FolderWriter, config: dict[str, Any], kind: FolderKind) -> None:
        """Write the configuration of a Hugging Face model, or of its LoRA adapters if the folder has only these."""
        lora, base = self._spec.training.lora, self._spec.model.path
        if kind == "artifact" and lora is not None and not lora.merge:
            writer.write_json("adapter_config.json", adapter_description(config, self._spec))
            return
        from share_compute.models.huggingface.decoder import hidden_size_of, published_config  # noqa: PLC0415

        writer.write_json("config.json", published_config(config, self._objective))
        if self._pooling is not None:
            size, length = hidden_size_of(config) or 0, self._spec.training.sequence_length
            for name, content in described_pooling(self._pooling, size, length).items():
                writer.write_json(name, content)
        images, transforms = self._spec.data.images, self._spec.data.transforms
        if images is not None:
            crop = None if transforms is None else transforms.crop
            writer.write_json("preprocessor_config.json", image_processor(images, crop))
        if base is not None:
            writer.copy(base.glob("generation_config.json"))


def require_unchanged(state: Mapping[str, Any], samples: int, digest: str | None) -> None:
    """Raise UserError if a checkpoint belongs to other data.

    Args:
        state: training state in the checkpoint.
        samples: number of training samples now.
        digest: `PreparedData.digest` now.
    """
    if state["train_samples"] != samples:
        reason = f"{samples} training samples now, {state['train_samples']} at the checkpoint"
    elif state.get("data") != digest:
        reason = "its encoding (classes, categories, means or scales) is not that of the checkpoint"
    else:
        return
    raise UserError(
        f"the data has changed: {reason}", hint="put the data files back as they were, or submit a new job"
    )


def _piece(member: Any, machine: str, number: int) -> Piece | None:
    return answered(PIECE, member.piece.remote(number), machine)


def _release_snapshots(members: Iterable[Any]) -> None:
    for member in members:
        with suppress(RayError):  # a dead member holds no snapshot
            ray.get(member.release_snapshot.remote())
