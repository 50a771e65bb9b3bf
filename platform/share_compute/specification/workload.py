"""Workloads of the planner: the size of a training step or of typical requests, independent of the machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from share_compute.specification import Collective, Objective, ServeJob
from share_compute.specification.boundaries import NO_BOUNDARY_COMPRESSION, BoundaryCompression

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 4}
"""Bytes of one activation, by dtype; with int8 weights, activations are float32."""
WEIGHT_BYTES = {**BYTES, "int8": 1}
"""Bytes of one weight of a layer or head, by dtype."""
AUTOCAST_KEPT = 0.7
"""Activation bytes of a layer that computes in bfloat16 or float16, as a fraction of its bytes in float32.

Norms, sums and the residual stream stay float32. The fraction was measured on Llama.
"""
GRADIENT_BUCKET_BYTES = 8 * 2**20
"""Smallest bucket limit, in bytes, of fusion mode auto. The cost model assumes buckets of this size."""


@dataclass(frozen=True, slots=True)
class TrainingWorkload:
    """Size of a training step; the objective is samples per second."""

    batch_size: int
    """Samples in one step."""
    microbatches: int
    """Number of microbatches that a batch is split into; each slice of a sequence counts as one."""
    sequence_length: int = 1
    """Tokens in one sample; 1 if samples are not text."""
    optimizer_tensors: int = 2
    """Number of state tensors that the optimizer keeps for each weight tensor, of the same size."""
    shares_optimizer: bool = False
    """Whether each member of a stage keeps an equal share of the optimizer's state."""
    branch_tensors: int = 0
    """Number of tensors that a branch keeps for each trained weight tensor, of the same size; 0 without branches."""
    dtype: str = "float32"
    """Data type of the computation; weights, gradients and optimizer state are float32."""
    activation_checkpointing: bool = False
    """Whether a layer keeps only its input, and computes its other activations again in the backward pass."""
    boundaries: BoundaryCompression = NO_BOUNDARY_COMPRESSION
    """Compression of what crosses the boundaries between stages."""
    collective: Collective = "auto"
    """Algorithm that sums the gradients of a stage's members."""
    run_bytes: float | None = None
    """Bytes of each number in the compressed sum of a run of microbatches; None if stages sum float32 gradients."""
    backups: bool = False
    """Whether state that only one machine holds is backed up on another machine."""
    batch_bytes: float = 0.0
    """Bytes of the inputs of a step, if each machine of the first stage reads all of them."""
    slices: int = 1
    """Number of slices of each sequence, which the members of a stage compute; 1 for whole sequences."""
    ranks: int = 1
    """Number of processes of each member; several each have parts of the parameters."""

    @property
    def state_tensors(self) -> int:
        """Number of tensors that a member keeps for each trained weight tensor, in addition to its gradient."""
        return self.optimizer_tensors + self.branch_tensors

    @property
    def slice_microbatches(self) -> int:
        """Number of microbatches that a member takes together: those of one slice, or 1 for whole sequences."""
        return self.microbatches // self.slices if self.slices > 1 else 1

    @property
    def microbatch_size(self) -> float:
        """Samples in one microbatch. For a slice, the fraction of samples with as many tokens."""
        return self.batch_size / self.microbatches


STEP_TOKENS = 512
"""Most positions of a decoder that all stages together compute at one time; more would delay decoding."""


@dataclass(frozen=True, slots=True)
class ServingWorkload:
    """Requests with a prompt and generated tokens; the objective is latency or throughput."""

    objective: Objective = "latency"
    """Shortest time of one request alone, or most tokens per second within the limits."""
    prompt_tokens: int = 512
    new_tokens: int = 128
    concurrent: int = 16
    """Maximum number of sequences that are generated at the same time."""
    first_token_limit_s: float | None = None
    """For objective throughput, the maximum time to the first token (TTFT) in seconds; None for no limit."""
    next_token_limit_s: float | None = None
    """For objective throughput, the maximum time per further token (TPOT) in seconds; None for no limit."""
    dtype: str = "float32"
    ranks: int = 1
    """Number of processes of each member, which compute its layers together."""


Workload: TypeAlias = TrainingWorkload | ServingWorkload


def serving_workload(spec: ServeJob) -> ServingWorkload:
    """Return the workload of a deployment, for the cost model."""
    return ServingWorkload(
        objective=spec.objective,
        prompt_tokens=spec.prompt_tokens,
        new_tokens=spec.new_tokens,
        concurrent=spec.max_concurrent,
        first_token_limit_s=spec.first_token_limit_s,
        next_token_limit_s=spec.next_token_limit_s,
        dtype=spec.dtype,
        ranks=spec.parallelism.tensor,
    )
