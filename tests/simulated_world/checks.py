"""Invariants of the simulated world. Commits, updates and pauses are compared with the undisturbed run."""

from __future__ import annotations

from collections.abc import Mapping

from tests.simulated_world.host import Host
from tests.simulated_world.record import DurableRecord
from tests.simulated_world.symbols import Reference, SymbolicModel, Weights

from share_compute.errors import VerificationFailed
from share_compute.protocol.coordinator import WriteStepLog
from share_compute.protocol.member_events import Apply
from share_compute.protocol.membership import Membership, Worker
from share_compute.protocol.messages import Prepared


class Checks:
    """Compares events with the results that are due.

    Args:
        model: model that is trained.
        reference: the undisturbed run.
        record: step log with the committed steps.
    """

    def __init__(self, model: SymbolicModel, reference: Reference, record: DurableRecord) -> None:
        self._model = model
        self._reference = reference
        self._record = record

    def before_commit(
        self,
        membership: Membership,
        record: WriteStepLog,
        prepared: Mapping[Worker, Prepared],
        hosts: Mapping[Worker, Host],
    ) -> None:
        """Check a step that a coordinator is about to record."""
        step = record.step
        assert step is not None
        _must(set(prepared) == set(membership.workers), f"step {step}: only {sorted(prepared)} are prepared")
        _must(record.scale == self._reference.scales[step], f"step {step} is scaled by {record.scale}")
        for worker, each in prepared.items():
            own = self._model.own_layers(membership.part_of(worker))
            gradient = {layer: self._reference.gradients[step][layer] for layer in own}
            is_right = each.squared_norms == self._model.norms(gradient)
            if not membership.has_shares(membership.stage_of(worker)):
                is_right = each.digest == self._model.digest(gradient)
            _must(is_right, f"step {step}: {worker} prepared another gradient")
        for worker in membership.workers:
            for holder in membership.copy_holders(worker):
                vault = hosts[holder].vaults.get(membership.part_of(worker))
                # In another epoch, the backup was restarted, or this coordinator was replaced and will be refused.
                if hosts[holder].machine.epoch == membership.epoch:
                    scales = {**hosts[holder].scales, step: record.scale}
                    is_kept = vault is not None and vault.reaches(step, scales)
                    _must(is_kept, f"step {step}: {holder} cannot rebuild what {worker} has")

    def before_update(self, host: Host, apply: Apply) -> None:
        """Check an update that a member is about to make."""
        what = f"{host.worker} applies step {apply.step}"
        _must(apply.step == host.machine.applied + 1, f"{what} after {host.machine.applied}")
        _must(apply.step <= self._record.committed, f"{what}, which is not committed")
        _must(apply.scale == self._reference.scales[apply.step], f"{what} scaled by {apply.scale}")
        self.weights(host, host.weights, apply.step - 1)

    def at_pause(self, host: Host, step: int) -> None:
        """Check a member that pauses after a step, according to a coordinator."""
        _must(host.machine.applied == step, f"{host.worker} pauses before step {step} is applied")
        self.weights(host, host.weights, step)

    def weights(self, host: Host, weights: Weights, step: int) -> None:
        """Check weights of a member after a step: those of its share, or of all its layers."""
        is_share = weights.keys() == host.own.keys()
        layers = weights.keys() if is_share else range(*host.shard)
        right = {layer: self._reference.weights[step][layer] for layer in layers}
        _must(weights == right, f"{host.worker} has other weights after step {step}")


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise VerificationFailed(otherwise, hint="find the event before: the same seed gives the same run")
