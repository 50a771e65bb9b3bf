"""Questions to isolated processes, and their answers: length-prefixed JSON, which both sides validate."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from share_compute.files.data_preview import DataPreview
from share_compute.files.folder_facts import FolderFacts
from share_compute.models.profiles.places import Places
from share_compute.specification import DataSpec, SparseJob, TableSpec, Task, TrainJob
from share_compute_api.schemas.layout import FoundLayout
from share_compute_api.workers.isolated.vocabulary import Vocabulary

HEADER = struct.Struct("<I")
"""Frame header: length of the JSON that follows, in bytes."""
MOST_QUESTION_BYTES = 32 << 20
MOST_ANSWER_BYTES = 64 << 20
"""Largest accepted answer; a vocabulary of a million tokens fits."""
OUT_OF_MEMORY = "too_much_memory"
"""Code of the error about a question for which a process reached its memory limit."""
OUT_OF_MEMORY_STATUS = 77
"""Exit status of a process that reached its memory limit."""
MOST_DETAIL = 16_384
"""Maximum length of an error's message, in characters."""
_SMALLER_FILES = "give smaller files, or fewer"

Result = TypeVar("Result", bound=BaseModel)
TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Done(_Message):
    """Answer to a check that found no problem."""


class Tokens(_Message):
    """Token ids: one tuple for each text."""

    texts: tuple[tuple[TokenId, ...], ...]


class LargestId(_Message):
    """Largest token id of a tokenizer; None if the tokenizer has no tokens."""

    largest: TokenId | None


class ModelSizes(_Message):
    """Sizes of a model, with the defaults of its architecture; None for a size that its architecture lacks."""

    window: int | None = None
    """Longest sequence, in tokens."""
    layers: int | None = None
    """Number of hidden layers."""


class WeightFiles(_Message):
    """Names of the files that hold the weights of a model."""

    names: tuple[str, ...]


class Question(_Message, Generic[Result]):
    """A task for an isolated process."""

    subject: ClassVar[str]
    """Name of the content that the process evaluates, for error messages; for example, "the JSON schema"."""
    hint: ClassVar[str] = "make it smaller"
    """Advice if the process takes too much time or memory."""
    needs_torch: ClassVar[bool] = False
    """Whether the process needs torch, which the others lack. A process with torch answers one question, and ends."""

    @property
    def answer(self) -> type[Result]:
        """Pydantic model of the question's answer."""
        raise NotImplementedError

    @property
    def source(self) -> str:
        """Key for fair scheduling: questions with the same key use at most `PoolLimits.per_source` processes."""
        return ""


class OfTokenizer(Question[Result], Generic[Result]):
    """A task that needs a model's tokenizer."""

    subject = "the model's tokenizer or chat template"
    hint = "send less; if it is so for short requests, too, fix it and deploy the model again"
    folder: Path
    version: int
    """Version of the folder's content; the tokenizer is reloaded when the version changes."""

    @property
    def source(self) -> str:
        """Key for fair scheduling: the model's folder."""
        return str(self.folder)


class Load(OfTokenizer[Done]):
    """Load a tokenizer into the cache, for later questions."""

    kind: Literal["load"] = "load"

    @property
    def answer(self) -> type[Done]:
        """Pydantic model of the question's answer."""
        return Done


class Describe(OfTokenizer[Vocabulary]):
    """Return the vocabulary of a tokenizer."""

    kind: Literal["describe"] = "describe"

    @property
    def answer(self) -> type[Vocabulary]:
        """Pydantic model of the question's answer."""
        return Vocabulary


class Encode(OfTokenizer[Tokens]):
    """Convert texts to token ids."""

    kind: Literal["encode"] = "encode"
    texts: tuple[str, ...]
    window_tokens: int

    @property
    def answer(self) -> type[Tokens]:
        """Pydantic model of the question's answer."""
        return Tokens


class TemplateOptions(_Message):
    """Options of a chat template."""

    variables: dict[str, Any] = Field(default_factory=dict)
    """Values of the template's own variables, such as ``enable_thinking``."""
    add_generation_prompt: bool = True
    """Whether the formatted text ends with the start of the assistant's answer."""
    continue_final_message: bool = False
    """Whether the formatted text ends inside the last message, which the model continues."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the template describes to the model, in the form of the OpenAI API."""


class Chat(OfTokenizer[Tokens]):
    """Format a conversation with the model's chat template, and convert it to token ids."""

    kind: Literal["chat"] = "chat"
    messages: tuple[dict[str, Any], ...]
    options: TemplateOptions = TemplateOptions()
    window_tokens: int

    @property
    def answer(self) -> type[Tokens]:
        """Pydantic model of the question's answer."""
        return Tokens


class FindLargestId(Question[LargestId]):
    """Return the largest token id in a ``tokenizer.json``."""

    subject = "tokenizer.json"
    kind: Literal["largest_id"] = "largest_id"
    file: Path

    @property
    def source(self) -> str:
        """Key for fair scheduling: the file's folder."""
        return str(self.file.parent)

    @property
    def answer(self) -> type[LargestId]:
        """Pydantic model of the question's answer."""
        return LargestId


class CheckSchema(Question[Done]):
    """Check that generation can be constrained to a JSON schema."""

    subject = "the JSON schema"
    kind: Literal["schema"] = "schema"
    text: str
    owner: str
    """Key for fair scheduling: the model's folder, or ``batches`` for the schema of a batch."""

    @property
    def source(self) -> str:
        """Key for fair scheduling: ``owner``."""
        return self.owner

    @property
    def answer(self) -> type[Done]:
        """Pydantic model of the question's answer."""
        return Done


class CheckModel(Question[ModelSizes]):
    """Check that a model of this configuration can be trained, and return its sizes; see `check_trainable`."""

    subject = "the model's configuration"
    kind: Literal["model"] = "model"
    config: dict[str, Any]
    task: Task = "language_model"

    @property
    def source(self) -> str:
        """Key for fair scheduling: the model's architecture."""
        return str(self.config.get("model_type"))

    @property
    def answer(self) -> type[ModelSizes]:
        """Pydantic model of the question's answer."""
        return ModelSizes


class _OfLayers(Question[Done]):
    """A check of a model's layers; the process builds the layers without weights."""

    subject = "the model's configuration"
    needs_torch = True
    config: dict[str, Any]
    """Configuration of the model when the question is asked. An answer is remembered for an equal question only."""

    @property
    def source(self) -> str:
        """Key for fair scheduling: the same for all, so that checks with torch occupy few processes."""
        return "parallelism"

    @property
    def answer(self) -> type[Done]:
        """Pydantic model of the question's answer."""
        return Done


class CheckRanks(_OfLayers):
    """Check that the ranks of a member can divide a language model that is to be served; see `require_divisible`."""

    kind: Literal["ranks"] = "ranks"
    ranks: int


class CheckParallelism(_OfLayers):
    """Check that a training job's model can be computed as ``parallelism`` says; see `require_parallelism`."""

    kind: Literal["parallelism"] = "parallelism"
    job: TrainJob


class ReadWeightIndex(Question[WeightFiles]):
    """Return the files that the index of a model on the Hub names; see `weight_files`."""

    subject = "the model's index"
    kind: Literal["weight_index"] = "weight_index"
    text: str
    repository: str

    @property
    def source(self) -> str:
        """Key for fair scheduling: the repository."""
        return self.repository

    @property
    def answer(self) -> type[WeightFiles]:
        """Pydantic model of the question's answer."""
        return WeightFiles


class ReadLayout(Question[FoundLayout]):
    """Return where each weight is that the headers of safetensors files describe; see `layout_of`."""

    subject = "the headers of the weights"
    kind: Literal["layout"] = "layout"
    headers: dict[str, str]
    """The header of each file, by the file's name."""
    places: Places | None
    """Naming scheme of the model's weights; None if it is unknown."""
    pattern: str | None
    """Glob of the names of the listed weights; None lists none."""
    most: int
    """Maximum number of weights to list."""
    job: str
    """Id of the job that wrote the files."""

    @property
    def source(self) -> str:
        """Key for fair scheduling: the job."""
        return self.job

    @property
    def answer(self) -> type[FoundLayout]:
        """Pydantic model of the question's answer."""
        return FoundLayout


class ReadModelFacts(Question[FolderFacts]):
    """Return the facts about the model in a folder; see `model_facts`."""

    subject = "the model's folder"
    kind: Literal["model_facts"] = "model_facts"
    folder: Path

    @property
    def source(self) -> str:
        """Key for fair scheduling: the same for all models, so that a catalogue occupies few processes."""
        return "catalogue"

    @property
    def answer(self) -> type[FolderFacts]:
        """Pydantic model of the question's answer."""
        return FolderFacts


class OfFiles(Question[Done]):
    """A check of data files."""

    hint = _SMALLER_FILES
    files: tuple[Path, ...]

    @property
    def answer(self) -> type[Done]:
        """Pydantic model of the question's answer."""
        return Done

    @property
    def source(self) -> str:
        """Key for fair scheduling: the folder of the first file."""
        return str(self.files[0].parent)


class CheckInputs(OfFiles):
    """Check the first rows of a batch's input files; see `Inputs.check`."""

    subject = "reading the files"
    kind: Literal["inputs"] = "inputs"
    column: str
    holds: Literal["text", "messages"]
    taken: tuple[str, ...]
    """Names of the output columns for answers. The input files must not contain columns with these names."""
    is_united: bool
    """Whether to check that the schemas of the .parquet files can be merged into one output file."""


class CheckTables(OfFiles):
    """Check the columns and the first rows of a training job's tables; see `check_tables`."""

    subject = "reading the tables"
    kind: Literal["tables"] = "tables"
    table: TableSpec
    target_is_class: bool
    in_features: int | None = None


class CheckTexts(OfFiles):
    """Check the columns of a training job's texts with labels; see `check_columns`."""

    subject = "reading the texts"
    kind: Literal["texts"] = "texts"
    data: DataSpec


class CheckManifests(OfFiles):
    """Check the columns of manifests of images; see `check_manifest`."""

    subject = "reading the manifests"
    kind: Literal["manifests"] = "manifests"


class CheckSparseRows(OfFiles):
    """Check the first rows of the files of a sparse model; see `check_first_rows`."""

    subject = "reading the rows"
    kind: Literal["sparse_rows"] = "sparse_rows"
    job: SparseJob


class PreviewData(Question[DataPreview]):
    """Return the first rows of a training job's data; see `preview_of`."""

    subject = "reading the data"
    hint = _SMALLER_FILES
    kind: Literal["preview"] = "preview"
    data: DataSpec
    task: Task

    @property
    def answer(self) -> type[DataPreview]:
        """Pydantic model of the question's answer."""
        return DataPreview

    @property
    def source(self) -> str:
        """Key for fair scheduling: the folder of the first file."""
        return str(self.data.all_files[0].parent) if self.data.files else ""


AnyQuestion: TypeAlias = Annotated[
    Load
    | Describe
    | Encode
    | Chat
    | FindLargestId
    | CheckSchema
    | CheckModel
    | CheckRanks
    | CheckParallelism
    | ReadWeightIndex
    | ReadLayout
    | ReadModelFacts
    | CheckInputs
    | CheckTables
    | CheckTexts
    | CheckManifests
    | CheckSparseRows
    | PreviewData,
    Field(discriminator="kind"),
]
questions: TypeAdapter[AnyQuestion] = TypeAdapter(AnyQuestion)


class ErrorMessage(_Message):
    """Fields of the `ShareComputeError` that a question caused."""

    code: str = Field(max_length=100)
    detail: str = Field(max_length=MOST_DETAIL)
    hint: str | None = Field(default=None, max_length=MOST_DETAIL)
    details: dict[str, Any] | None = None


class Reply(BaseModel, Generic[Result]):
    """Reply to a question: a result, or a problem."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    result: Result | None = None
    problem: ErrorMessage | None = None
