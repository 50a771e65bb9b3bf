"""Questions to isolated processes and their answers: JSON in frames, validated on both sides; nothing is pickled."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from share_compute_api.workers.isolated.vocabulary import Vocabulary

HEADER = struct.Struct("<I")
"""Length of the JSON that follows, in bytes."""
MOST_QUESTION_BYTES = 32 << 20
MOST_ANSWER_BYTES = 64 << 20
"""Longest answer; a vocabulary of a million tokens fits."""
OUT_OF_MEMORY_STATUS = 77
"""Exit status of a process that reached its limit of memory."""
MOST_DETAIL = 16_384
"""Most characters of an error's message."""

Result = TypeVar("Result", bound=BaseModel)
TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Done(_Message):
    """The answer of a check that found nothing wrong."""


class Tokens(_Message):
    """Token ids of one or several texts."""

    texts: tuple[tuple[TokenId, ...], ...]


class LargestId(_Message):
    """Largest token id of a tokenizer; None if it has no tokens."""

    largest: TokenId | None


class Question(_Message, Generic[Result]):
    """A task for an isolated process."""

    subject: ClassVar[str]
    """Cause of the use of time and memory, for error messages."""

    @property
    def answer(self) -> type[Result]:
        """Model of its answer."""
        raise NotImplementedError

    @property
    def source(self) -> str:
        """Origin of the work: work of one source never takes all processes while others wait."""
        return ""


class OfTokenizer(Question[Result], Generic[Result]):
    """A task that needs a model's tokenizer."""

    subject = "the model's tokenizer or chat template"
    folder: Path
    version: int
    """A tokenizer that is loaded with another version is loaded again."""

    @property
    def source(self) -> str:
        """The model's folder."""
        return str(self.folder)


class Load(OfTokenizer[Done]):
    """Load a tokenizer, for later questions."""

    kind: Literal["load"] = "load"

    @property
    def answer(self) -> type[Done]:
        """Model of its answer."""
        return Done


class Describe(OfTokenizer[Vocabulary]):
    """Load a tokenizer, and return its vocabulary."""

    kind: Literal["describe"] = "describe"

    @property
    def answer(self) -> type[Vocabulary]:
        """Model of its answer."""
        return Vocabulary


class Encode(OfTokenizer[Tokens]):
    """Turn texts into tokens."""

    kind: Literal["encode"] = "encode"
    texts: tuple[str, ...]
    window_tokens: int

    @property
    def answer(self) -> type[Tokens]:
        """Model of its answer."""
        return Tokens


class Chat(OfTokenizer[Tokens]):
    """Format a conversation with the model's template, and turn it into tokens."""

    kind: Literal["chat"] = "chat"
    messages: tuple[dict[str, str], ...]
    window_tokens: int

    @property
    def answer(self) -> type[Tokens]:
        """Model of its answer."""
        return Tokens


class FindLargestId(Question[LargestId]):
    """Find the largest token id in a ``tokenizer.json``."""

    subject = "tokenizer.json"
    kind: Literal["largest_id"] = "largest_id"
    file: Path

    @property
    def source(self) -> str:
        """The folder of the file."""
        return str(self.file.parent)

    @property
    def answer(self) -> type[LargestId]:
        """Model of its answer."""
        return LargestId


class CheckSchema(Question[Done]):
    """Check that generated text can follow a JSON schema."""

    subject = "the JSON schema"
    kind: Literal["schema"] = "schema"
    text: str
    owner: str
    """Name of the requester, used as `source`."""

    @property
    def source(self) -> str:
        """The requester."""
        return self.owner

    @property
    def answer(self) -> type[Done]:
        """Model of its answer."""
        return Done


class CheckModel(Question[Done]):
    """Check that a model of this configuration can be trained; see `check_trainable`."""

    subject = "the model's configuration"
    kind: Literal["model"] = "model"
    config: dict[str, Any]

    @property
    def source(self) -> str:
        """The architecture."""
        return str(self.config.get("model_type"))

    @property
    def answer(self) -> type[Done]:
        """Model of its answer."""
        return Done


class CheckInputs(Question[Done]):
    """Check the first rows of files; see `Inputs.check`."""

    subject = "reading the files"
    kind: Literal["inputs"] = "inputs"
    files: tuple[Path, ...]
    column: str
    holds: Literal["text", "messages"]
    taken: tuple[str, ...]
    """Names of columns that answers are written into."""
    is_united: bool
    """Whether one output file is to have the columns of all files."""

    @property
    def answer(self) -> type[Done]:
        """Model of its answer."""
        return Done

    @property
    def source(self) -> str:
        """The folder of the first file."""
        return str(self.files[0].parent)


AnyQuestion: TypeAlias = Annotated[
    Load | Describe | Encode | Chat | FindLargestId | CheckSchema | CheckModel | CheckInputs,
    Field(discriminator="kind"),
]
questions: TypeAdapter[AnyQuestion] = TypeAdapter(AnyQuestion)


class Problem(_Message):
    """An error that the work ended with; see `ShareComputeError`."""

    code: str = Field(max_length=100)
    detail: str = Field(max_length=MOST_DETAIL)
    hint: str | None = Field(default=None, max_length=MOST_DETAIL)
    details: dict[str, Any] | None = None


class Reply(BaseModel, Generic[Result]):
    """Reply to a question: a result, or a problem."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    result: Result | None = None
    problem: Problem | None = None
