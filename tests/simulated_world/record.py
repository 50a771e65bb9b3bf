"""The simulated step log: the committed steps, and the epoch of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from share_compute.protocol.coordinator import Recorded, Superseded, WriteStepLog


@dataclass
class DurableRecord:
    """State that survives every failure. Writes are transactions, each conditional on the epoch."""

    epoch: int = 0
    committed: int = 0
    scale: float = 1.0
    generation: int = 0
    epochs: list[int] = field(default_factory=list)
    """Epoch of each committed step."""

    def write(self, record: WriteStepLog) -> Recorded | Superseded:
        """Write what a coordinator asks for, or refuse it as superseded."""
        if record.step is None:
            if record.epoch <= self.epoch:
                return Superseded()
            self.epoch = record.epoch
        else:
            if record.epoch != self.epoch or record.step != self.committed + 1:
                return Superseded()
            self.committed, self.scale, self.generation = record.step, record.scale, record.generation
            self.epochs.append(record.epoch)
        return Recorded(self.epoch, self.committed, self.scale, self.generation)
