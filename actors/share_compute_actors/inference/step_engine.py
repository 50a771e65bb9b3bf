"""A member's compute thread: it executes engine steps one at a time, and submitted functions between steps.

Each stage sends hidden states to the next one. The last stage sends sampled tokens to the server, and to the first
stage, where they are the next inputs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from share_compute.errors import ContributorLost, VerificationFailed, WrongTensor
from share_compute.inference.runtime.engine_stage import EngineStage
from share_compute.inference.scheduler.engine_steps import EngineStep, SampledToken, StepResult
from share_compute.models.boundary import Expected
from share_compute.models.devices import operations
from share_compute.models.numbers import is_finite
from share_compute_actors.group.allocator import as_reported
from share_compute_actors.group.compute_thread import ComputeThread
from share_compute_actors.inference.messages import Row, ToServer, Trouble
from share_compute_actors.transport.envelope import WireLabel

_HANDSHAKE_S = 0.5
"""Time between two handshakes while this member waits, in seconds. A handshake tells the receiver how many tensors were
sent, so that the receiver notices a loss."""
_MOST_UNREAD = 64
"""Maximum number of engine steps whose tokens the first stage leaves unread."""

NotifyServer = Callable[[ToServer], None]


class StepEngine(ComputeThread):
    """Executes a member's engine steps, one at a time, on the compute thread.

    Args:
        notify: sends a message to the server; called on the compute thread.
        on_failure: as in `ComputeThread`.
    """

    def __init__(self, notify: NotifyServer, on_failure: Callable[[BaseException], None]) -> None:
        super().__init__(on_failure)
        self._notify = notify
        self.stage: EngineStage | None = None
        self.keeps_plain = False
        """Whether a shard that is sealed during an engine step may keep packed and plain copies of weights."""
        self._row: Row | None = None
        self._place = 0
        self._steps: deque[EngineStep] = deque()
        self._halted = 0
        """First epoch whose engine steps are executed; those of earlier epochs are dropped."""
        self._open: set[int] = set()
        """Sequences that have a KV slot; at the first stage only."""
        self._fed_back: dict[int, int] = {}
        """The last token of each open sequence, which is the sequence's next input; at the first stage only."""
        self._unread: deque[tuple[int, tuple[int, ...]]] = deque()
        """(step id, sampled sequences) of engine steps whose tokens were not read yet; at the first stage only."""
        self.computed_s = 0.0
        """Total compute time since the member started, in seconds."""
        self.is_computing = False
        self._start()

    # -- from other threads ------------------------------------------------------------------------------------------

    def put(self, steps: list[EngineStep]) -> None:
        """Queue engine steps, in the order of their ids."""
        with self._news:
            self._steps.extend(step for step in steps if step.epoch >= self._halted)
            self._news.notify()

    def halt(self, epoch: int) -> None:
        """Drop the engine steps of epochs before ``epoch``, and interrupt a wait for their tensors."""
        with self._news:
            self._halted = max(self._halted, epoch)
            channel = self.channel
            self._steps = deque(step for step in self._steps if step.epoch >= self._halted)
        if channel is not None and channel.epoch < epoch:
            channel.interrupt()

    @property
    def epoch(self) -> int:
        """The epoch whose engine steps are executed; 0 before the first epoch and after a failed engine step."""
        row = self._row
        return 0 if row is None else row.epoch

    @property
    def last_epoch(self) -> int:
        """The last epoch that the server began or announced; 0 before the first."""
        return max(self._halted, self.epoch)

    # -- orders ------------------------------------------------------------------------------------------------------

    def begin(self, row: Row, place: int) -> None:
        """Start to execute the engine steps of an epoch, with empty KV caches; call this through `order`."""
        assert self.stage is not None
        self.stage.clear()
        self._open.clear()
        self._fed_back.clear()
        self._unread.clear()
        self._row, self._place = row, place
        if len(row.workers) == 1:
            self.open(None)

    def unload(self) -> None:
        """Free the shard and its KV caches; call this through `order`."""
        self.stage = self._row = None

    # -- the thread --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        with torch.inference_mode():
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._orders or self._steps, _HANDSHAKE_S)
                    order = self._next_order()
                    step = self._steps.popleft() if order is None and self._steps else None
                if order is not None:
                    self._run_order(order)
                elif step is not None:
                    self._execute(step)
                elif self.channel is not None:
                    self.channel.report_sent()

    def _execute(self, step: EngineStep) -> None:
        if self._row is None or step.epoch != self._row.epoch or step.epoch < self._halted:
            return
        try:
            self._compute(step)
        except Exception as failure:  # noqa: BLE001 - the report goes to the server, which decides
            self._on_failure(failure)
            self.is_computing = False
            self._row = None  # later steps of this epoch depend on this one, so `_execute` drops them
            self._notify(Trouble(step.epoch, as_reported(failure), step.id))

    def _compute(self, step: EngineStep) -> None:
        assert self.stage is not None
        assert self._row is not None
        is_first, is_last = self._place == 0, self._place == len(self._row.workers) - 1
        if is_first:
            self._open.difference_update(step.closes)
            self._open.update(opening.sequence for opening in step.opens)
        inputs = self._inputs(step, self._row.names)
        if not self.stage.is_sealed and all(chunk.count == 1 for chunk in step.chunks):
            # Sealing is slow. It is delayed until a step without long prompts, so that restarted sequences continue
            # first.
            self.stage.seal(keeps_plain=self.keeps_plain)
        start_s, self.is_computing = time.perf_counter(), True
        outputs = self.stage.compute(step, inputs)
        operations(self.stage.device).synchronize()
        self.computed_s += time.perf_counter() - start_s
        self.is_computing = False
        if is_last:
            assert isinstance(outputs, tuple)
            drawn = [outcome for outcome in outputs if isinstance(outcome, SampledToken)]
            tokens = [sampled.token for sampled in drawn]
            if is_first:
                self._feed_back([sampled.sequence for sampled in drawn], tokens)
            elif tokens:
                self._send(0, WireLabel("serve", step.id, "token", 0, self._place), torch.tensor(tokens))
            self._notify(StepResult(step.id, step.epoch, outputs))
        elif step.chunks:
            assert isinstance(outputs, Tensor)
            self._send(self._place + 1, WireLabel("serve", step.id, "activation", 0, self._place), outputs)
        if is_first and not is_last and self.stage.draws:
            self._expect(step)
        if self.channel is not None and step.id % _MOST_UNREAD == 0:
            self.channel.forget(step.id - _MOST_UNREAD, "serve")

    def _inputs(self, step: EngineStep, names: Sequence[str]) -> Tensor:
        """Return the token ids ``[tokens]`` (first stage) or the received hidden states ``[tokens, hidden]``."""
        if not step.chunks:
            return torch.empty(0, dtype=torch.int64)
        if self._place:
            before = self._place - 1
            hidden = self._receive(WireLabel("serve", step.id, "activation", 0, before), names[before])
            self._require_fit(step, hidden, before, names[before])
            return hidden
        wanted = {chunk.sequence for chunk in step.chunks if chunk.tokens is None}
        while any(not wanted.isdisjoint(sequences) for _, sequences in self._unread):
            self._read(names[-1])
        return torch.tensor(step.input_ids(self._fed_back), dtype=torch.int64)

    def _require_fit(self, step: EngineStep, hidden: Tensor, place: int, source: str) -> None:
        """Check shape, dtype and values of received hidden states.

        Args:
            step: the engine step of the hidden states.
            hidden: the hidden states.
            place: index of the stage that sent them.
            source: name of the sender's machine.

        Raises:
            WrongTensor: shape or dtype is wrong.
            VerificationFailed: some numbers are not finite; the model itself may be the cause.
        """
        assert self.stage is not None
        assert self._row is not None
        tokens = sum(chunk.count for chunk in step.chunks)
        what = Expected((tokens, self.stage.hidden_size), frozenset({self.stage.dtype})).misfit(hidden)
        if what is not None:
            raise WrongTensor.of(source, self._row.workers[place], f"hidden states: {what}")
        if not is_finite(hidden):
            raise VerificationFailed(
                f"hidden states from {source} are not finite",
                machine=source,
                hint="serve the model in another precision; if others answer well, check that machine's memory",
            )

    def _expect(self, step: EngineStep) -> None:
        """Record that the last stage will send the tokens of a step; read older tokens if too many are unread."""
        assert self._row is not None
        sampling = tuple(chunk.sequence for chunk in step.chunks if chunk.samples)
        if sampling:
            self._unread.append((step.id, sampling))
        while len(self._unread) > _MOST_UNREAD:
            self._read(self._row.names[-1])

    def _read(self, source: str) -> None:
        """Wait for the tokens of the oldest engine step in `_unread`, and store them as inputs of the sequences."""
        assert self._row is not None
        step, sequences = self._unread.popleft()
        label = WireLabel("serve", step, "token", 0, len(self._row.workers) - 1)
        self._feed_back(sequences, self._receive(label, source).tolist())

    def _feed_back(self, sequences: Sequence[int], tokens: Sequence[int]) -> None:
        self._fed_back.update(zip(sequences, tokens, strict=True))
        # Drop tokens of sequences whose KV slots were closed before the tokens arrived.
        self._fed_back = {one: token for one, token in self._fed_back.items() if one in self._open}

    def _send(self, place: int, label: WireLabel, tensor: Tensor) -> None:
        assert self._row is not None
        assert self.channel is not None
        self.channel.send(self._row.workers[place], label, tensor)

    def _receive(self, label: WireLabel, source: str) -> Tensor:
        """Wait for a tensor, without a time limit.

        Raises:
            StaleEpoch: the epoch is over, or a tensor was lost in transit.
            WrongTensor: the tensor arrived, but cannot be read.
        """
        assert self.channel is not None
        while True:
            try:
                return self.channel.receive(label, source, _HANDSHAKE_S)
            except ContributorLost:
                self.channel.report_sent()  # other waiting receivers can then notice that a tensor was lost
