"""What a submitter asks for: one frozen model, the same as YAML file, REST body and form.

`parse_job` turns text or a mapping into a `TrainJob`; `job_schema` is the published JSON schema.
"""

from share_compute.specification.base import SpecModel, TextPath
from share_compute.specification.data import TEXT_SUFFIXES, DataSpec, TokenizerSpec
from share_compute.specification.job import ParallelismSpec, TrainJob, field_errors, job_schema, parse_job
from share_compute.specification.model import LAYER_TYPES, LayerSpec, ModelSpec
from share_compute.specification.optimization import (
    SCHEDULES,
    GradientFusionSpec,
    OptimizerName,
    OptimizerSpec,
    ScheduleSpec,
)
from share_compute.specification.training import (
    EarlyStoppingSpec,
    LoraSpec,
    Precision,
    SamplesSpec,
    TrainingSpec,
)

__all__ = [
    "LAYER_TYPES",
    "SCHEDULES",
    "TEXT_SUFFIXES",
    "DataSpec",
    "EarlyStoppingSpec",
    "GradientFusionSpec",
    "LayerSpec",
    "LoraSpec",
    "ModelSpec",
    "OptimizerName",
    "OptimizerSpec",
    "ParallelismSpec",
    "Precision",
    "SamplesSpec",
    "ScheduleSpec",
    "SpecModel",
    "TextPath",
    "TokenizerSpec",
    "TrainJob",
    "TrainingSpec",
    "field_errors",
    "job_schema",
    "parse_job",
]
