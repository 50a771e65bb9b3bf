"""Bodies of the routes that return where the weights of a result or of a checkpoint are."""

from __future__ import annotations

from pydantic import ConfigDict

from share_compute.files.described import DescribedModel

MOST_LISTED = 10_000
"""Maximum number of weights in an answer."""


class _Body(DescribedModel):
    model_config = ConfigDict(frozen=True)


class WeightEntry(_Body):
    """One weight in a safetensors file."""

    name: str
    file: str
    """Name of the file."""
    dtype: str
    """Type of the numbers, as safetensors names it, for example ``F32``."""
    shape: tuple[int, ...]
    size_bytes: int
    layer: int | None
    """Index of the layer; -1 before the first layer, the number of layers after the last one; null if unknown."""


class LayerWeights(_Body):
    """The weights of one layer, or of the modules before the first or after the last layer."""

    layer: int | None
    """Index of the layer; -1 before the first layer, the number of layers after the last one; null if unknown."""
    weights: int
    """Number of weights."""
    size_bytes: int
    files: tuple[str, ...]
    """Names of the files that hold the weights, in order."""
    tied: tuple[str, ...]
    """Names of the weights that the modules after the last layer use too, so that the last stage holds them as well."""


class FoundLayout(_Body):
    """The weights in safetensors files, by layer."""

    layers: tuple[LayerWeights, ...]
    """The layers that have weights, in order; weights of unknown layers come last."""
    weights: tuple[WeightEntry, ...]
    """The weights whose names match the pattern, in the order of layers and names."""
    matched: int
    """Number of weights whose names match; more than ``weights`` has if the answer's limit was reached."""


class StageEntry(_Body):
    """One stage that holds layers, with its machines."""

    stage: int
    """Number of the stage, from 0."""
    branch: int | None
    """Number of the branch, for jobs whose branches merge in rounds; null for other jobs."""
    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    machines: dict[str, str]
    """Names of the machines that hold all layers of the stage, by id."""


class WeightLayout(FoundLayout):
    """Where each weight of a result or of a checkpoint is: its file, its layer, and the machines that trained it."""

    num_layers: int | None
    """Number of layers of the model; null if it is unknown."""
    stages: tuple[StageEntry, ...]
    """Stages of the job's last plan. Weights before the first layer are in the first stage of each branch, and those
    after the last layer in its last stage. Empty if no plan is known."""

    def stages_of(self, layer: int | None, *, is_tied: bool) -> list[StageEntry]:
        """Return the stages that hold the weights of a layer; tied weights are in the last stage too.

        Args:
            layer: as in `LayerWeights.layer`.
            is_tied: whether the modules after the last layer use the weights too.
        """
        if layer is None or not self.num_layers:
            return []
        last = self.num_layers - 1
        layers = {min(max(layer, 0), last), *([last] if is_tied else [])}
        return [stage for stage in self.stages if any(stage.start <= layer < stage.stop for layer in layers)]
