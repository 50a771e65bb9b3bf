"""An engine in this process, for small models and trials: the scheduler and a whole model run in one thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, Literal

import torch

from share_compute.data.tokenization import has_chat_template
from share_compute.errors import ShareComputeError, Unavailable, UserError, as_ours
from share_compute.inference.runtime.encoder_stage import EncoderStage
from share_compute.inference.runtime.engine_stage import EngineStage
from share_compute.inference.runtime.stage import ServingStage
from share_compute.inference.scheduler.engine_steps import EngineStep, SampledToken, StepResult
from share_compute.inference.scheduler.events import Emitted, Failed, SequenceEvent, Stats
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.options import Generation
from share_compute.inference.scheduler.scheduler import Scheduler
from share_compute.models.configuration import declared_config
from share_compute.models.huggingface.encoder_types import Pooling, pooling_of
from share_compute.models.huggingface.sizes import LAYER_KEYS, whole_number
from share_compute.shards import Shard
from share_compute.specification import ModelSpec
from share_compute_api.openai.embedding import embedded
from share_compute_api.openai.engine import ModelFacts
from share_compute_api.openai.recovery import RequestStream
from share_compute_api.submission.model_folders import model_window

_DEFAULT_WINDOW_TOKENS = 2048
_STEP_TOKENS = 256
_MOST_QUEUED = 256
_log = logging.getLogger(__name__)


class LocalEngine:
    """Serves a model from this process; call `close` in the end.

    Args:
        name: name of the model.
        folder: folder with its weights, configuration and tokenizer.
        window_tokens: most tokens of a prompt and its answer together; default: the model's own window.
        max_sequences: most sequences at one time.
        max_queued: most sequences that wait.

    Raises:
        UserError: the model cannot be loaded or served.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        window_tokens: int | None = None,
        max_sequences: int = 16,
        max_queued: int = _MOST_QUEUED,
    ) -> None:
        config = declared_config(ModelSpec(path=folder))
        layers = whole_number(config, *LAYER_KEYS)
        if layers is None:
            raise UserError(f"{folder} does not say how many layers it has", hint="fix its config.json")
        window = window_tokens or model_window(folder, config) or _DEFAULT_WINDOW_TOKENS
        pooling = pooling_of(folder, config)
        kind: Literal["generate", "embed"] = "embed" if pooling else "generate"
        self.facts = ModelFacts(name, kind, int(time()), window, folder, has_chat_template(folder))
        self._stage = _stage(config, Shard(name, 0, layers, layers), window, folder, pooling)
        self._stage.load(folder)
        self._limits = SchedulerLimits(
            window_tokens=window,
            kv_tokens=window * max_sequences,
            max_sequences=max_sequences,
            step_tokens=max(window, _STEP_TOKENS) if pooling else _STEP_TOKENS,
            stages=1,
            max_queued=max_queued,
            run_ahead=0,
            embeds=pooling is not None,
        )
        self._scheduler = Scheduler(self._limits)
        self._fed_back: dict[int, int] = {}
        self._streams: dict[int, RequestStream] = {}
        """The stream of each sequence that has not ended."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = threading.Condition()
        """Guards the scheduler; notified when a sequence comes or is cancelled, and at the end."""
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=f"serves-{name}", daemon=True)
        self._thread.start()

    async def generate(self, generations: Sequence[Generation]) -> RequestStream:
        """Accept sequences; see `TextEngine.generate`."""
        self._loop = asyncio.get_running_loop()
        numbers = [generation.sequence for generation in generations]
        with self._news:
            if self._has_ended:
                raise Unavailable(f"model {self.facts.name} is not served any more", hint="deploy it again")
            ended = self._scheduler.submit(*generations)
            self._news.notify()
        # Events of the thread arrive through the event loop, so none can arrive before the stream is registered.
        stream = RequestStream(numbers, self._cancel)
        self._streams |= dict.fromkeys(numbers, stream)
        self._deliver(ended)
        return stream

    async def embed(self, owner: str, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Turn texts into vectors; see `VectorEngine.embed`."""
        return await embedded(self.generate, owner, prompts)

    def _deliver(self, events: Sequence[SequenceEvent]) -> None:
        for event in events:
            is_last = not isinstance(event, Emitted)
            stream = self._streams.pop(event.sequence, None) if is_last else self._streams.get(event.sequence)
            if stream is not None:
                stream.put(event)

    def stats(self) -> Stats:
        """Return the scheduler's statistics."""
        with self._news:
            return self._scheduler.stats()

    def close(self) -> None:
        """Accept no more sequences, and give up the present ones."""
        with self._news:
            self._has_ended = True
            self._news.notify()
        self._thread.join()
        if self._loop is not None:
            over = Unavailable(f"model {self.facts.name} was taken down", hint="name another one")
            with suppress(RuntimeError):  # a loop that was closed meanwhile has no reader to notify
                self._loop.call_soon_threadsafe(
                    lambda: self._deliver([Failed(sequence, over) for sequence in self._streams])
                )

    def _cancel(self, sequence: int, _is_complete: bool) -> None:
        self._streams.pop(sequence, None)
        with self._news:
            self._scheduler.cancel(sequence)
            self._news.notify()

    def _run(self) -> None:
        while (steps := self._next_steps()) is not None:
            for step in steps:
                try:
                    self._report(self._complete(step))
                except Exception as failure:  # noqa: BLE001 - reported to the readers of its sequences
                    _log.exception("a step failed")
                    self._report(self._restart(step, as_ours(failure)))
                    break

    def _next_steps(self) -> list[EngineStep] | None:
        """Wait for engine steps to compute, and return them; None after `close`."""
        with self._news:
            while not self._has_ended:
                steps = self._scheduler.next_steps()
                if steps:
                    return steps
                self._news.wait()
        return None

    def _complete(self, step: EngineStep) -> list[SequenceEvent]:
        sampled = self._stage.compute(step, torch.tensor(step.input_ids(self._fed_back), dtype=torch.int64))
        assert isinstance(sampled, tuple)
        for closed in step.closes:
            self._fed_back.pop(closed, None)
        self._fed_back |= {one.sequence: one.token for one in sampled if isinstance(one, SampledToken)}
        result = StepResult(step.id, step.epoch, sampled)
        with self._news:
            return self._scheduler.completed(result)

    def _restart(self, step: EngineStep, failure: ShareComputeError) -> list[SequenceEvent]:
        """Give up the sequence that a failure names, or all of the engine step, and compute all others again."""
        inside = {chunk.sequence for chunk in step.chunks} | {opening.sequence for opening in step.opens}
        given_up = inside & {failure.details.get("sequence")} or inside
        self._stage.clear()
        self._fed_back.clear()
        with self._news:
            for sequence in given_up:
                self._scheduler.cancel(sequence)
            events = self._scheduler.reform(self._scheduler.epoch + 1, self._limits)
        return [*(Failed(sequence, failure) for sequence in sorted(given_up)), *events]

    def _report(self, events: list[SequenceEvent]) -> None:
        if events and self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, events)


def _stage(
    config: Mapping[str, Any], shard: Shard, window_tokens: int, folder: Path, pooling: Pooling | None
) -> EngineStage:
    device = torch.device("cpu")
    if pooling is not None:
        return EncoderStage(config, shard, device, window_tokens=window_tokens, pooling=pooling)
    return ServingStage(config, shard, device, window_tokens=window_tokens, tokenizer=folder)
