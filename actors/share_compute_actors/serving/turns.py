"""A member's one compute thread: it executes turns in the order of their ids, and orders from outside between them.

Hidden states go from pool to pool; the tokens that the last pool draws go to the first one, which feeds them back, and
to the server. Everything that touches weights, caches or the channel happens on this thread. Other threads only leave
turns and orders here, and end waits that have become pointless.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from share_compute.errors import ContributorLost, VerificationFailed, WrongTensor
from share_compute.models.boundary import Expected
from share_compute.serving.stage import input_ids
from share_compute.serving.turn_stage import TurnStage
from share_compute.serving.turns import Sampled, Turn, TurnResult
from share_compute.training.numbers import is_finite
from share_compute_actors.member.allocator import as_told
from share_compute_actors.member.channel import Channel
from share_compute_actors.messages import Label
from share_compute_actors.serving.messages import Row, ToServer, Trouble

_GREETING_S = 0.5
"""Time between two greetings while this member waits: they tell how much was sent, so that a loss is noticed."""
_MOST_UNREAD = 64
"""Turns whose tokens the first pool need not have looked at: more are never in flight."""

Result = TypeVar("Result")
Tell = Callable[[ToServer], None]


class TurnEngine:
    """Executes turns.

    Args:
        tell: takes what the server must hear, from the compute thread.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.stage: TurnStage | None = None
        self.keeps_plain = False
        """Whether the stage has room for weights that are held twice, once it is sealed."""
        self.channel: Channel | None = None
        self._row: Row | None = None
        self._place = 0
        self._turns: deque[Turn] = deque()
        self._orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._news = threading.Condition()
        self._halted = 0
        """Epochs before this one are over."""
        self._open: set[int] = set()
        """Sequences that have a slab, at the first pool."""
        self._fed_back: dict[int, int] = {}
        """The last token of each sequence, at the first pool."""
        self._unread: deque[tuple[int, tuple[int, ...]]] = deque()
        """Turns whose tokens were not looked at yet, and the sequences that they sampled, at the first pool."""
        self.computed_s = 0.0
        """Time spent in computing."""
        self.is_computing = False
        self._thread = threading.Thread(target=self._loop, name="compute", daemon=True)
        self._thread.start()

    # -- from other threads ------------------------------------------------------------------------------------------

    def put(self, turns: list[Turn]) -> None:
        """Take in turns, in the order of their ids."""
        with self._news:
            self._turns.extend(turn for turn in turns if turn.epoch >= self._halted)
            self._news.notify()

    def halt(self, epoch: int) -> None:
        """Give up what belongs to earlier epochs."""
        with self._news:
            self._halted = max(self._halted, epoch)
            channel = self.channel
            self._turns = deque(turn for turn in self._turns if turn.epoch >= self._halted)
        if channel is not None and channel.epoch < epoch:
            channel.interrupt()

    def order(self, work: Callable[[], Result]) -> Result:
        """Run something on the compute thread, and return what it returns."""
        future: Future[Result] = Future()
        with self._news:
            self._orders.append((work, future))
            self._news.notify()
        return future.result()

    @property
    def epoch(self) -> int:
        """The epoch whose turns are executed."""
        row = self._row
        return 0 if row is None else row.epoch

    # -- orders ------------------------------------------------------------------------------------------------------

    def open(self, channel: Channel | None) -> None:
        """Talk through this channel from now on; an order."""
        with self._news:
            old, self.channel = self.channel, channel
        if old is not None:
            old.close()

    def begin(self, row: Row, place: int) -> None:
        """Take the turns of an epoch, with no caches; an order."""
        assert self.stage is not None
        self.stage.clear()
        self._open.clear()
        self._fed_back.clear()
        self._unread.clear()
        self._row, self._place = row, place
        if len(row.workers) == 1:
            self.open(None)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        with torch.inference_mode():
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._orders or self._turns, _GREETING_S)
                    order = self._orders.popleft() if self._orders else None
                    turn = self._turns.popleft() if order is None and self._turns else None
                if order is not None:
                    _carry_out(*order)
                elif turn is not None:
                    self._execute(turn)
                elif self.channel is not None:
                    self.channel.greet()

    def _execute(self, turn: Turn) -> None:
        if self._row is None or turn.epoch != self._row.epoch or turn.epoch < self._halted:
            return
        try:
            self._compute(turn)
        except Exception as failure:  # noqa: BLE001 - the server must hear of it, and decides what comes next
            self.is_computing = False
            self._row = None  # the rest of this epoch's turns would lack this one
            self._tell(Trouble(turn.epoch, as_told(failure), turn.id))

    def _compute(self, turn: Turn) -> None:
        assert self.stage is not None
        assert self._row is not None
        is_first, is_last = self._place == 0, self._place == len(self._row.workers) - 1
        if is_first:
            self._open.difference_update(turn.closes)
            self._open.update(opening.sequence for opening in turn.opens)
        inputs = self._inputs(turn, self._row.names)
        if not self.stage.is_sealed and all(chunk.count == 1 for chunk in turn.chunks):
            self.stage.seal(keeps_plain=self.keeps_plain)  # all that waited for it have gone on
        start_s, self.is_computing = time.perf_counter(), True
        outputs = self.stage.compute(turn, inputs)
        self.computed_s += time.perf_counter() - start_s
        self.is_computing = False
        if is_last:
            assert isinstance(outputs, tuple)
            drawn = [outcome for outcome in outputs if isinstance(outcome, Sampled)]
            tokens = [sampled.token for sampled in drawn]
            if is_first:
                self._feed_back([sampled.sequence for sampled in drawn], tokens)
            elif tokens:
                self._send(0, Label("serve", turn.id, "token", 0, self._place), torch.tensor(tokens))
            self._tell(TurnResult(turn.id, turn.epoch, outputs))
        elif turn.chunks:
            assert isinstance(outputs, Tensor)
            self._send(self._place + 1, Label("serve", turn.id, "activation", 0, self._place), outputs)
        if is_first and not is_last and self.stage.draws:
            self._expect(turn)
        if self.channel is not None and turn.id % _MOST_UNREAD == 0:
            self.channel.forget(turn.id - _MOST_UNREAD, "serve")

    def _inputs(self, turn: Turn, names: Sequence[str]) -> Tensor:
        """Return ids ``[tokens]`` or what the pool before computed, ``[tokens, hidden]``."""
        if not turn.chunks:
            return torch.empty(0, dtype=torch.int64)
        if self._place:
            before = self._place - 1
            hidden = self._receive(Label("serve", turn.id, "activation", 0, before), names[before])
            self._require_fit(turn, hidden, before, names[before])
            return hidden
        wanted = {chunk.sequence for chunk in turn.chunks if chunk.tokens is None}
        while any(not wanted.isdisjoint(sequences) for _, sequences in self._unread):
            self._read(names[-1])
        return input_ids(turn, self._fed_back)

    def _require_fit(self, turn: Turn, hidden: Tensor, place: int, source: str) -> None:
        """See that hidden states are what the model says.

        Args:
            turn: for which they came.
            hidden: they.
            place: of the member that sent them.
            source: name of its machine.

        Raises:
            WrongTensor: they have another shape or type, which no sound machine makes.
            VerificationFailed: they are not finite, which the model itself may make.
        """
        assert self.stage is not None
        assert self._row is not None
        tokens = sum(chunk.count for chunk in turn.chunks)
        what = Expected((tokens, self.stage.hidden_size), frozenset({self.stage.dtype})).misfit(hidden)
        if what is not None:
            raise WrongTensor.of(source, self._row.workers[place], f"hidden states: {what}")
        if not is_finite(hidden):
            raise VerificationFailed(
                f"hidden states from {source} are not finite",
                machine=source,
                mend="serve the model in another precision; if others answer well, check that machine's memory",
            )

    def _expect(self, turn: Turn) -> None:
        """Take note that the last pool will send what it draws in a turn; look at what it sent long ago."""
        assert self._row is not None
        sampling = tuple(chunk.sequence for chunk in turn.chunks if chunk.samples)
        if sampling:
            self._unread.append((turn.id, sampling))
        while len(self._unread) > _MOST_UNREAD:
            self._read(self._row.names[-1])

    def _read(self, source: str) -> None:
        """Wait for the tokens of the first turn whose tokens were not looked at."""
        assert self._row is not None
        turn, sequences = self._unread.popleft()
        label = Label("serve", turn, "token", 0, len(self._row.workers) - 1)
        self._feed_back(sequences, self._receive(label, source).tolist())

    def _feed_back(self, sequences: Sequence[int], tokens: Sequence[int]) -> None:
        self._fed_back.update(zip(sequences, tokens, strict=True))
        # Tokens may come back of sequences whose slabs are closed already.
        self._fed_back = {one: token for one, token in self._fed_back.items() if one in self._open}

    def _send(self, place: int, label: Label, tensor: Tensor) -> None:
        assert self._row is not None
        assert self.channel is not None
        self.channel.send(self._row.workers[place], label, tensor)

    def _receive(self, label: Label, source: str) -> Tensor:
        """Wait for a tensor, for as long as nobody interrupts that.

        Raises:
            StaleEpoch: the epoch is over, or something was lost on its way.
        """
        assert self.channel is not None
        while True:
            try:
                return self.channel.receive(label, source, _GREETING_S)
            except ContributorLost:
                self.channel.greet()  # who waits for this member's tensors meanwhile must miss what was lost


def _carry_out(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as failure:  # noqa: BLE001 - who ordered it gets it
        future.set_exception(failure)
