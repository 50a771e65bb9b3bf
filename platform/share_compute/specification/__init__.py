"""Specifications of jobs and deployments, as frozen pydantic models.

All parsers take text or a mapping:

- `parse_job` returns a `TrainJob`.
- `parse_any_job` returns a job of any kind, but no deployment.
- `parse_deployment` returns a `ServeJob`.
- `parse_submission` returns a job or a deployment, depending on its kind.

`job_schema` returns the JSON schema of a kind.
"""

from share_compute.choices import Compiling, Objective, ServedPrecision
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
from share_compute.specification.chain import GenerateLinkSpec, LinkName, ServeLinkSpec, ThenSpec
from share_compute.specification.data import (
    IMAGE_SUFFIXES,
    LABELLED_SUFFIXES,
    MANIFEST_SUFFIXES,
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    DataSpec,
    ImagesSpec,
    LabelsSpec,
    PairsSpec,
    TableSpec,
    TokenizerSpec,
)
from share_compute.specification.job import TrainJob
from share_compute.specification.kinds.drawing import settings_of, trial_job
from share_compute.specification.kinds.parsing import (
    AnyJob,
    Job,
    Kind,
    job_schema,
    parse_any_job,
    parse_deployment,
    parse_job,
    parse_submission,
    require_training,
)
from share_compute.specification.kinds.sweep import SuccessiveHalvingSpec, SweepJob
from share_compute.specification.layers import LAYER_TYPES, LayerSpec
from share_compute.specification.model import ModelSpec
from share_compute.specification.optimization import (
    SCHEDULES,
    FusionSpec,
    OptimizerName,
    OptimizerSpec,
    PlateauOptions,
    ScheduleSpec,
)
from share_compute.specification.paths import Named, upload_path, with_paths
from share_compute.specification.placement.parallelism import ParallelismSpec
from share_compute.specification.replicas import Replicas, ReplicasSpec, read_replicas
from share_compute.specification.serve import (
    NAME_PATTERN,
    ServedModelSpec,
    ServeJob,
    ServingParallelismSpec,
)
from share_compute.specification.sparse.job import SPARSE_SUFFIXES, SparseJob
from share_compute.specification.task import LossName, LossSpec, Metric, TargetSpec, Task, TaskSpec
from share_compute.specification.training import (
    Collective,
    EarlyStoppingSpec,
    LoraSpec,
    Precision,
    SamplesSpec,
    TrainingSpec,
)
from share_compute.specification.transforms import CropSpec, TransformsSpec

__all__ = [
    "BATCH_KINDS",
    "IMAGE_SUFFIXES",
    "LABELLED_SUFFIXES",
    "LAYER_TYPES",
    "MANIFEST_SUFFIXES",
    "NAME_PATTERN",
    "ROW_SUFFIXES",
    "SCHEDULES",
    "SPARSE_SUFFIXES",
    "TABLE_SUFFIXES",
    "TEXT_SUFFIXES",
    "AnyJob",
    "BatchJob",
    "BatchSamplingSpec",
    "Collective",
    "Compiling",
    "CropSpec",
    "DataSpec",
    "EarlyStoppingSpec",
    "EmbedDataSpec",
    "EmbedJob",
    "FusionSpec",
    "GenerateDataSpec",
    "GenerateJob",
    "GenerateLinkSpec",
    "ImagesSpec",
    "Job",
    "Kind",
    "LabelsSpec",
    "LayerSpec",
    "LinkName",
    "LoraSpec",
    "LossName",
    "LossSpec",
    "Metric",
    "ModelSpec",
    "Named",
    "Objective",
    "OptimizerName",
    "OptimizerSpec",
    "PairsSpec",
    "ParallelismSpec",
    "PlateauOptions",
    "Precision",
    "Replicas",
    "ReplicasSpec",
    "SamplesSpec",
    "ScheduleSpec",
    "ServeJob",
    "ServeLinkSpec",
    "ServedModelSpec",
    "ServedPrecision",
    "ServingParallelismSpec",
    "SparseJob",
    "SpecModel",
    "SuccessiveHalvingSpec",
    "SweepJob",
    "TableSpec",
    "TargetSpec",
    "Task",
    "TaskSpec",
    "TextPath",
    "ThenSpec",
    "TokenizerSpec",
    "TrainJob",
    "TrainingSpec",
    "TransformsSpec",
    "job_schema",
    "parse_any_job",
    "parse_deployment",
    "parse_job",
    "parse_submission",
    "read_replicas",
    "require_training",
    "settings_of",
    "trial_job",
    "upload_path",
    "with_paths",
]
