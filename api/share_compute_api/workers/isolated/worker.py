"""The program of an isolated process: ``python -m share_compute_api.workers.isolated.worker BYTES [torch]``.

The program reads questions from standard input and answers each on standard output. At its start it limits its memory
to its current use plus ``BYTES``. The program exits at the end of its input, and when it runs out of memory. It imports
torch only with the argument ``torch``.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pydantic import BaseModel

from share_compute.errors import ShareComputeError, UserError, is_lack_of_memory
from share_compute_api.workers.isolated import messages
from share_compute_api.workers.isolated.kept import Kept
from share_compute_api.workers.isolated.weight_index import weight_files

if TYPE_CHECKING:
    from share_compute_api.workers.isolated.tokenizer import ServedTokenizer


class QuestionAnswerer:
    """Answers questions; caches the most recently used tokenizers."""

    def __init__(self) -> None:
        self._tokenizers: Kept[ServedTokenizer] = Kept()

    def answer(self, question: messages.AnyQuestion) -> BaseModel:
        """Return the answer to a question.

        Raises:
            ShareComputeError: the submitter's files or the request are wrong.
        """
        match question:
            case messages.Load():
                self._tokenizer(question)
            case messages.Describe():
                return self._tokenizer(question).vocabulary
            case messages.Encode():
                tokenizer = self._tokenizer(question)
                texts = tuple(tokenizer.encode(text, question.window_tokens) for text in question.texts)
                return messages.Tokens(texts=texts)
            case messages.Chat():
                tokenizer = self._tokenizer(question)
                text = tokenizer.chat(question.messages, question.options)
                return messages.Tokens(texts=(tokenizer.encode(text, question.window_tokens, is_chat=True),))
            case (
                messages.FindLargestId()
                | messages.CheckModel()
                | messages.PreviewData()
                | messages.ReadWeightIndex()
                | messages.ReadLayout()
                | messages.ReadModelFacts()
            ):
                return _facts(question)
            case messages.CheckRanks() | messages.CheckParallelism():
                _check_layers(question)
            case _:
                _check(question)
        return messages.Done()

    def _tokenizer(self, question: Any) -> ServedTokenizer:
        from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

        found = self._tokenizers.get(question.folder, question.version)
        if found is None:
            self._tokenizers.forget(question.folder)  # both versions may not fit
            found = ServedTokenizer(question.folder)
            self._tokenizers.put(question.folder, question.version, found)
        return found


def _facts(
    question: messages.FindLargestId
    | messages.CheckModel
    | messages.PreviewData
    | messages.ReadWeightIndex
    | messages.ReadLayout
    | messages.ReadModelFacts,
) -> BaseModel:
    if isinstance(question, messages.ReadModelFacts):
        from share_compute_api.workers.isolated.model_facts import model_facts

        return model_facts(question.folder)
    if isinstance(question, messages.ReadWeightIndex):
        return messages.WeightFiles(names=weight_files(question.text, question.repository))
    if isinstance(question, messages.ReadLayout):
        from share_compute_api.workers.isolated.weight_headers import layout_of

        return layout_of(question)
    if isinstance(question, messages.PreviewData):
        from share_compute.data.preview import preview_of

        return preview_of(question.data, question.task)
    if isinstance(question, messages.FindLargestId):
        from share_compute_api.workers.isolated.tokenizer import largest_id

        return messages.LargestId(largest=largest_id(question.file))
    from share_compute.models.huggingface.hub_configuration import check_trainable, hub_configuration
    from share_compute.models.huggingface.sizes import LAYER_KEYS, WINDOW_KEYS, whole_number

    check_trainable(question.config, question.task)
    config = hub_configuration(question.config).to_dict()
    return messages.ModelSizes(
        window=whole_number(config, *WINDOW_KEYS), layers=whole_number(config, *LAYER_KEYS)
    )


def _check(
    question: messages.CheckInputs
    | messages.CheckSchema
    | messages.CheckTables
    | messages.CheckTexts
    | messages.CheckManifests
    | messages.CheckSparseRows,
) -> None:
    if isinstance(question, messages.CheckSparseRows):
        from share_compute.sparse.jobs import check_first_rows

        check_first_rows(question.job)
        return
    if isinstance(question, messages.CheckTables):
        from share_compute.data.table_reading import check_tables

        check_tables(
            question.files,
            question.table,
            target_is_class=question.target_is_class,
            in_features=question.in_features,
        )
        return
    if isinstance(question, messages.CheckTexts):
        from share_compute.data.labelled_rows import check_columns as check_texts

        check_texts(question.data)
        return
    if isinstance(question, messages.CheckManifests):
        from share_compute.data.image_files import check_manifest

        for file in question.files:
            check_manifest(file)
        return
    if isinstance(question, messages.CheckSchema):
        from share_compute.inference.runtime.constraints import check_schema

        check_schema(question.text)
        return
    from share_compute.batches.inputs import Inputs
    from share_compute.batches.output import check_columns

    inputs = Inputs(question.files, question.column)
    inputs.check(str if question.holds == "text" else list, question.taken)
    if question.is_united:
        check_columns(question.files)


def _check_layers(question: messages.CheckRanks | messages.CheckParallelism) -> None:
    if isinstance(question, messages.CheckRanks):
        from share_compute.inference.runtime.tensor_parallel import require_divisible

        require_divisible(question.config, question.ranks)
        return
    from share_compute.data.tokenization import expected_vocab_size
    from share_compute.models.blueprint import blueprint_of
    from share_compute.sharding.layer_plans import require_parallelism

    require_parallelism(blueprint_of(question.job, expected_vocab_size(question.job)), question.job)


def limit_memory(more_bytes: int) -> None:
    """Limit memory to this process's current use plus ``more_bytes`` (Linux); forbid writing files and core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except FileNotFoundError:  # not Linux: no memory limit is set
        return
    data_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    # RLIMIT_DATA is used because RLIMIT_AS would also count mapped libraries.
    most = (data_kib << 10) + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    """Answer questions until the input ends."""
    more_bytes, has_torch = int(sys.argv[1]), sys.argv[2:] == ["torch"]
    # Libraries may print. Their output must not mix with the answers on the pipe, or fill the server's log.
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    if has_torch:
        _import_torch()
    else:
        _import_all()
    os.dup2(nowhere, 2)
    gc.freeze()  # so that the collections below visit few objects
    limit_memory(more_bytes)
    work = QuestionAnswerer()
    _send(answers, messages.Done())
    try:
        while (question := _next(sys.stdin.buffer)) is not None:
            _send(answers, _reply(work, question))
            if not isinstance(question, messages.OfTokenizer):
                gc.collect()  # tracebacks of exceptions may refer to frames that hold large parts of a file
    except MemoryError:
        os._exit(messages.OUT_OF_MEMORY_STATUS)


class _NoTorch(MetaPathFinder):
    """Refuses the import of torch. Packages that call `importlib.util.find_spec` for torch were imported before."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        del path, target
        if fullname == "torch":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _import_all() -> None:
    """Import the modules that most questions need.

    The imports count neither towards the memory limit nor towards the time limit of the first question. Libraries that
    read data files are imported by the first question that needs them, because few processes do.
    """
    # Prevent the import of torch, which takes seconds and 300 MB. Configuration classes import torch but do not need
    # it.
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then finds that it is not installed
    import llguidance
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    import share_compute.inference.runtime.constraints
    import share_compute.models.huggingface.hub_configuration

    del llguidance, tokenizers, PreTrainedTokenizerFast, share_compute
    sys.meta_path.insert(0, _NoTorch())
    del sys.modules["torch"]  # scipy looks for torch among the imported modules, and expects to find a module


def _import_torch() -> None:
    """Import the modules that questions with `Question.needs_torch` need."""
    import torch

    import share_compute.inference.runtime.tensor_parallel
    import share_compute.sharding.layer_plans

    del torch, share_compute


def _next(stream: BinaryIO) -> messages.AnyQuestion | None:
    header = stream.read(messages.HEADER.size)
    if len(header) < messages.HEADER.size:
        return None
    (size,) = messages.HEADER.unpack(header)
    return messages.questions.validate_json(stream.read(size))


def _reply(work: QuestionAnswerer, question: messages.AnyQuestion) -> BaseModel:
    try:
        return messages.Reply[Any](result=work.answer(question))
    except ShareComputeError as failure:
        return _problem(_within_limit(failure, question) if is_lack_of_memory(failure) else failure)
    except MemoryError:
        raise
    except BaseException as failure:
        if is_lack_of_memory(failure):
            raise MemoryError from failure
        # A panic of a Rust library is not an Exception.
        from share_compute_api.workers.isolated.tokenizer import shortened

        said = f"{question.subject} cannot be used: {type(failure).__name__}: {shortened(failure)}"
        return _problem(UserError(said, hint="use the files that the model was published with"))


def _within_limit(failure: ShareComputeError, question: messages.AnyQuestion) -> ShareComputeError:
    """Return the error with the code and the hint of the memory limit, which was reached where the error arose."""
    details = {**failure.details, "code": messages.OUT_OF_MEMORY}
    return UserError(failure.message, hint=question.hint, details=details)


def _problem(failure: ShareComputeError) -> BaseModel:
    return messages.Reply[Any](
        problem=messages.ErrorMessage(
            code=failure.code,
            detail=failure.message[: messages.MOST_DETAIL],
            hint=failure.hint,
            details=failure.details or None,
        )
    )


def _send(stream: BinaryIO, message: BaseModel) -> None:
    text = message.model_dump_json().encode()
    stream.write(messages.HEADER.pack(len(text)) + text)
    stream.flush()


if __name__ == "__main__":
    main()
