"""How much memory a member needs for its shard.

The estimate is ``parameters x 4 x (weights + gradients + optimizer tensors)`` plus, for each microbatch in flight,
``samples x tokens x (layers x (10 x hidden + 4 x intermediate) + 3 x vocabulary where the head is) x 4`` bytes: what a
decoder layer with fused attention keeps for its backward (measured on Llama; gemma2 keeps a fifth more).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from share_compute.planning.partitioning import Shard
from share_compute.specification import TrainJob

if TYPE_CHECKING:
    # At run time it would bring torch into the control plane, which never computes.
    from share_compute.models.blueprint import Anatomy

FLOAT_BYTES = 4


def member_bytes(spec: TrainJob, anatomy: Anatomy, shard: Shard, in_flight: int) -> int:
    """Return the bytes that a member of the pool that holds ``shard`` needs in training.

    Args:
        spec: the job.
        anatomy: parameters of its model.
        shard: the layers held.
        in_flight: microbatches whose activations are kept at one time.
    """
    # Imported here, because it brings torch: the control plane reads plans, but never computes.
    from share_compute.training.optimizers import STATE_TENSORS  # noqa: PLC0415

    copies = 2 + STATE_TENSORS[spec.training.optimizer.name]
    weights = anatomy.of(shard) * FLOAT_BYTES * copies
    tokens = spec.training.microbatch_size * (spec.training.sequence_length if anatomy.vocab_size else 1)
    per_token = len(shard) * (10 * anatomy.hidden_size + 4 * anatomy.intermediate_size)
    if shard.is_last:
        per_token += 3 * anatomy.vocab_size
    return weights + in_flight * tokens * per_token * FLOAT_BYTES
