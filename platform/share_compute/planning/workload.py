"""What a plan is made for: how a model is used, apart from where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Objective: TypeAlias = Literal["latency", "throughput"]
"""What a model is served for: the shortest answer, or most tokens a second within the limits."""
ServedPrecision: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]
"""What the weights of a served model are held as."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 4}
"""Bytes of one number that is computed, by dtype; beside weights in int8 all is float32."""
WEIGHT_BYTES = {**BYTES, "int8": 1}
"""Bytes of one weight of a layer or head, by dtype."""
AUTOCAST_KEPT = 0.7
"""Of what a layer keeps in float32, how much it keeps where products are in two bytes: norms and sums stay float32, and
so does what runs past them. Measured on Llama."""
GRADIENT_BUCKET_BYTES = 8 * 2**20
"""Gradients are summed in pieces of this size: most of a sum hides behind the backward pass, latency does not count."""


@dataclass(frozen=True, slots=True)
class TrainingWorkload:
    """Optimizer steps over batches; the objective is samples a second."""

    batch_size: int
    """Samples in one step."""
    microbatches: int
    """Pieces that a batch is cut into."""
    sequence_length: int = 1
    """Tokens in one sample; 1 where samples are no text."""
    optimizer_tensors: int = 2
    """Tensors as large as the weights that the optimizer keeps."""
    dtype: str = "float32"
    """What it computes in; weights, gradients and optimizer state are float32."""
    activation_checkpointing: bool = False
    """Whether only what enters a layer is kept for its backward, which computes the rest again."""
    buddies: bool = False
    """Whether what only one machine holds is copied to another: that one gets the gradient of each step, too."""

    @property
    def microbatch_size(self) -> float:
        """Samples in one microbatch."""
        return self.batch_size / self.microbatches


@dataclass(frozen=True, slots=True)
class ServingWorkload:
    """Requests of a prompt and generated tokens; the objective is latency or throughput."""

    objective: Objective = "latency"
    """Shortest time of one request alone, or most tokens a second within the limits."""
    prompt_tokens: int = 512
    new_tokens: int = 128
    concurrent: int = 16
    """Most sequences that are generated at one time; their cache is reserved."""
    first_token_limit_s: float | None = None
    """TTFT limit for objective throughput."""
    next_token_limit_s: float | None = None
    """TPOT limit for objective throughput."""
    dtype: str = "float32"


Workload: TypeAlias = TrainingWorkload | ServingWorkload
