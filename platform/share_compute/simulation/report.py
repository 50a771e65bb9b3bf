"""The report of a simulation."""

from __future__ import annotations

from share_compute.files.strict import StrictModel


class Hours(StrictModel):
    """Time of a job by purpose, in seconds. The fields add up to the simulated time."""

    computing_s: float = 0.0
    """Time for committed steps, and for the step in progress at the end."""
    redoing_s: float = 0.0
    """Time for work that was computed again after the death of a machine."""
    noticing_s: float = 0.0
    planning_s: float = 0.0
    moving_s: float = 0.0
    """Time to send state over links and to start members."""
    waiting_s: float = 0.0
    """Time in which the job had no plan."""

    @property
    def total_s(self) -> float:
        """The whole simulation, in seconds."""
        return float(sum(self.model_dump().values()))


class FleetReport(StrictModel):
    """Results of all simulations of a job on a fleet."""

    machines: int
    mean_machines: float
    """Mean number of machines that were present."""
    mean_members: float
    """Mean number of machines that held a part of the job."""
    simulated_s: float
    seed: int
    samples_per_s: float
    """Samples of committed steps or merged contributions per second, over the whole time."""
    tokens_per_s: float
    utilisation: float
    """Share of the measured FLOP/s of all present machines that was used for these samples."""
    deaths: int
    """Number of deaths of machines, whether or not they held a part of the job."""
    member_deaths: int
    """Number of deaths of machines that held a part of the job."""
    replacements: int
    """Number of deaths after which the job or an island continued: with a similar machine in place of the dead one, or,
    in rounds, with any other machines."""
    searches: int
    """Number of times that the planner was asked for a plan, including the first plan."""


class SimulationReport(FleetReport):
    """Results of the simulation of a job in lockstep on a fleet."""

    layers: int
    parameters: int
    microbatches: int
    first_step_s: float
    """Predicted step time of the first plan, in seconds."""
    member_utilisation: float
    """Share of the measured FLOP/s of the job's members that was used for committed steps."""
    attempted_steps: int
    """Committed steps plus `lost_steps`."""
    committed_steps: int
    lost_steps: int
    """Number of machine deaths at which work of the step in progress was lost."""
    epochs: int
    hours: Hours
    curve_samples_per_s: tuple[float, ...]
    """Committed samples per second, over equal parts of the time."""


class BranchHours(StrictModel):
    """Time of all branches by purpose, in seconds. The fields add up to the simulated time times the branches."""

    computing_s: float = 0.0
    """Time for the steps of rounds, with pauses after losses."""
    redone_s: float = 0.0
    """Time for rounds that were begun again."""
    sending_s: float = 0.0
    waiting_s: float = 0.0
    """Time from a contribution to its merge."""
    receiving_s: float = 0.0
    idle_s: float = 0.0
    """Time without enough machines."""

    @property
    def total_s(self) -> float:
        """The simulated time of all branches, in seconds."""
        return float(sum(self.model_dump().values()))


class RoundsReport(FleetReport):
    """Results of the simulation of a job whose branches merge in rounds."""

    branches: int
    islands: int
    """Number of islands that train the branches."""
    policy: str
    """Kind of synchronization, such as ``local``."""
    every: int
    """Steps that each branch takes in a round."""
    first_round_s: float
    """Predicted time of a round with the first placement, in seconds."""
    rounds: int
    """Number of merges."""
    merged_contributions: int
    missing_contributions: int
    """Number of branches without a contribution, over all merges; 0 if contributions are merged one by one."""
    late_contributions: int
    """Number of contributions that were merged with those of a later round, or dropped."""
    ignored_contributions: int
    """Number of contributions that no merge contains."""
    computing_share: float
    """Share of the time in which branches computed steps of rounds that were not begun again."""
    sent_bytes: int
    """Bytes of all contributions that branches sent."""
    received_bytes: int
    """Bytes of all updates that branches received."""
    restarts: int
    """Number of rounds of a branch that were begun again."""
    stranded: int
    """Number of deaths after which an island had to wait for machines."""
    returns: int
    """Number of moves of islands back to their first machines."""
    hours: BranchHours
