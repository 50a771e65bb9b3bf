"""Specifications of jobs and deployments, as frozen pydantic models.

All parsers take text or a mapping:

- `parse_job` returns a `TrainJob`.
- `parse_any_job` returns a job of any kind, but no deployment.
- `parse_deployment` returns a `ServeJob`.
- `parse_submission` returns a job or a deployment, depending on its kind.

`job_schema` returns the JSON schema of a kind.
"""

from share_compute.specification.base import SpecModel, TextPath
from share_compute.specification.batch import (
    BATCH_KINDS,
    ROW_SUFFIXES,
    BatchJob,
    BatchSamplingSpec,
    EmbedDataSpec,
    EmbedJob,
    GenerateDataSpec,
    GenerateJob,
)
from share_compute.specification.data import (
    IMAGE_SUFFIXES,
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    DataSpec,
    ImagesSpec,
    TableSpec,
    TokenizerSpec,
)
from share_compute.specification.job import (
    Job,
    Kind,
    ParallelismSpec,
    TrainJob,
    job_schema,
    parse_any_job,
    parse_deployment,
    parse_job,
    parse_submission,
)
from share_compute.specification.model import LAYER_TYPES, LayerSpec, ModelSpec
from share_compute.specification.optimization import (
    SCHEDULES,
    GradientFusionSpec,
    OptimizerName,
    OptimizerSpec,
    ScheduleSpec,
)
from share_compute.specification.paths import Named, upload_path, with_paths
from share_compute.specification.replicas import Replicas, ReplicasSpec, read_replicas
from share_compute.specification.serve import (
    NAME_PATTERN,
    Objective,
    ServedModelSpec,
    ServedPrecision,
    ServeJob,
    ServingParallelismSpec,
)
from share_compute.specification.task import LossName, LossSpec, Metric, TargetSpec, Task
from share_compute.specification.training import (
    Collective,
    EarlyStoppingSpec,
    LoraSpec,
    Precision,
    SamplesSpec,
    TrainingSpec,
)

__all__ = [
    "BATCH_KINDS",
    "IMAGE_SUFFIXES",
    "LAYER_TYPES",
    "NAME_PATTERN",
    "ROW_SUFFIXES",
    "SCHEDULES",
    "TABLE_SUFFIXES",
    "TEXT_SUFFIXES",
    "BatchJob",
    "BatchSamplingSpec",
    "Collective",
    "DataSpec",
    "EarlyStoppingSpec",
    "EmbedDataSpec",
    "EmbedJob",
    "GenerateDataSpec",
    "GenerateJob",
    "GradientFusionSpec",
    "ImagesSpec",
    "Job",
    "Kind",
    "LayerSpec",
    "LoraSpec",
    "LossName",
    "LossSpec",
    "Metric",
    "ModelSpec",
    "Named",
    "Objective",
    "OptimizerName",
    "OptimizerSpec",
    "ParallelismSpec",
    "Precision",
    "Replicas",
    "ReplicasSpec",
    "SamplesSpec",
    "ScheduleSpec",
    "ServeJob",
    "ServedModelSpec",
    "ServedPrecision",
    "ServingParallelismSpec",
    "SpecModel",
    "TableSpec",
    "TargetSpec",
    "Task",
    "TextPath",
    "TokenizerSpec",
    "TrainJob",
    "TrainingSpec",
    "job_schema",
    "parse_any_job",
    "parse_deployment",
    "parse_job",
    "parse_submission",
    "read_replicas",
    "upload_path",
    "with_paths",
]
