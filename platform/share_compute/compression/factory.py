"""Makes codecs from specifications."""

from __future__ import annotations

import torch

from share_compute.compression.codec import Codec, ErrorFeedback
from share_compute.compression.low_rank import PowerSgdCodec
from share_compute.compression.quantization import FloatCodec, IntegerCodec, SignCodec, TwoMagnitudesCodec
from share_compute.compression.rows import RowCodec
from share_compute.compression.sparse import TopKCodec
from share_compute.specification.compression import (
    CompressionSpec,
    NoCompressionSpec,
    PowerSgdSpec,
    QuantizationSpec,
    TopKSpec,
)

_ROW_CODECS: dict[str, RowCodec] = {
    "float32": FloatCodec(),
    "bf16": FloatCodec(torch.bfloat16),
    "int8": IntegerCodec(8),
    "int4": IntegerCodec(4),
    "int2": TwoMagnitudesCodec(),
    "sign": SignCodec(),
}


def codec_of(spec: CompressionSpec, seed: int) -> Codec:
    """Return the codec that a specification describes, with error feedback if it asks for that.

    Args:
        spec: codec and options; ``from_step`` is up to the caller.
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
