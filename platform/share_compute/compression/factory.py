"""Makes codecs from specifications."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import torch

from share_compute.compression.codec import Codec, ErrorFeedback
from share_compute.compression.low_rank import PowerSgdCodec
from share_compute.compression.quantization import FloatCodec, IntegerCodec, SignCodec, TwoMagnitudesCodec
from share_compute.compression.rows import RowCodec
from share_compute.compression.sparse import TopKCodec
from share_compute.compression.sums import BucketCodec
from share_compute.specification import TrainingSpec
from share_compute.specification.compression import (
    CompressionSpec,
    NoCompressionSpec,
    PowerSgdSpec,
    QuantizationSpec,
    TopKSpec,
)

Layout: TypeAlias = Sequence[Sequence[tuple[str, tuple[int, ...]]]]
_MANY: Final = 2**20
_ROW_CODECS: dict[str, RowCodec] = {
    "float32": FloatCodec(),
    "bf16": FloatCodec(torch.bfloat16),
    "int8": IntegerCodec(8),
    "int4": IntegerCodec(4),
    "int2": TwoMagnitudesCodec(),
    "sign": SignCodec(),
}


def codec_of(spec: CompressionSpec, seed: int) -> Codec:
    """Return the codec that a specification describes, with error feedback if the specification enables it.

    Args:
        spec: codec and options. The caller applies ``from_step``.
        seed: seed of the job.
    """
    match spec:
        case NoCompressionSpec():
            return FloatCodec()
        case QuantizationSpec():
            codec: Codec = _ROW_CODECS[spec.name]
        case TopKSpec():
            codec = TopKCodec(spec.density, spec.chunk, _ROW_CODECS[spec.values])
        case PowerSgdSpec():
            codec = PowerSgdCodec(spec.rank, seed)
    return codec if spec.error_feedback is None else ErrorFeedback(codec, spec.error_feedback)


def codec_of_round(training: TrainingSpec, round_number: int) -> Codec:
    """Return the codec of the contributions to a round.

    Rounds that end before ``compression.from_step`` send float32 values; this does not change the other codec's state.
    Payloads can be decoded with any seed: only the first state of an encoder depends on the seed.

    Args:
        training: training settings of a job with rounds.
        round_number: the round, from 1.
    """
    return codec_of(_spec_of_round(training, round_number), training.seed)


def codec_of_update(training: TrainingSpec, version: int) -> Codec:
    """Return the codec of the update that makes a new version of the weights.

    Contributions with top-k may keep values at different indices. So the update keeps as many values as all
    contributions together, up to all. Branches with their own weights receive the job's result unchanged.
    """
    policy = training.rounds
    assert policy is not None
    if policy.keeps_own_weights and version >= policy.rounds(training.steps):
        return FloatCodec()
    spec = _spec_of_round(training, version)
    if isinstance(spec, TopKSpec) and not policy.merges_apart:
        spec = spec.model_copy(update={"density": min(1.0, spec.density * policy.branches)})
    return codec_of(spec, training.seed)


def bucket_codecs(training: TrainingSpec, layout: Layout) -> tuple[BucketCodec, ...]:
    """Return the codec of each bucket of gradients that a stage sums; empty if sums are not compressed.

    Args:
        training: training settings of the job.
        layout: names and shapes of the parameters of each bucket.
    """
    if not training.compresses_sums:
        return ()
    codec = codec_of(training.compression, training.seed)
    return tuple(BucketCodec(codec, tuple(shape for _, shape in bucket)) for bucket in layout)


def run_bytes(training: TrainingSpec) -> float:
    """Return the approximate number of bytes that one value of a large compressed gradient takes."""
    return codec_of(training.compression, training.seed).num_bytes((_MANY,)) / _MANY


def _spec_of_round(training: TrainingSpec, number: int) -> CompressionSpec:
    spec, policy = training.compression, training.rounds
    if isinstance(spec, NoCompressionSpec) or policy is None:
        return spec
    # Branches that push to a parameter server one after another make one version each.
    rounds = number / policy.branches if policy.merges_apart else number
    return NoCompressionSpec() if rounds * policy.every < spec.from_step else spec
