"""The codec of each round of a job with branches."""

from __future__ import annotations

from share_compute.compression.codec import Codec
from share_compute.compression.factory import codec_of
from share_compute.specification import TrainingSpec
from share_compute.specification.compression import LossyCompressionSpec, NoCompressionSpec
from share_compute.specification.synchronization import LocalSpec


def codec_of_round(training: TrainingSpec, number: int) -> Codec:
    """Return the codec of a round's contributions and of the update that its merge makes.

    Rounds that end before ``compression.from_step`` send float32 values, which leave the state of the other codec as it
    is. Payloads can be decoded with any seed: only the first state of an encoder depends on the seed.

    Args:
        training: training settings of a job with branches, or of one of its branches.
        number: the round, from 1; it makes the version of the same number.
    """
    policy, spec = training.synchronization, training.compression
    assert isinstance(policy, LocalSpec)
    if isinstance(spec, LossyCompressionSpec) and number * policy.every < spec.from_step:
        spec = NoCompressionSpec()
    return codec_of(spec, training.seed)
