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


class SimulationReport(StrictModel):
    """Results of the simulation of a job on a fleet."""

    machines: int
    mean_machines: float
    """Mean number of machines that were present."""
    mean_members: float
    """Mean number of machines that held a part of the job."""
    simulated_s: float
    seed: int
    layers: int
    parameters: int
    microbatches: int
    first_step_s: float
    """Predicted step time of the first plan, in seconds."""
    samples_per_s: float
    """Committed samples per second, over the whole time."""
    tokens_per_s: float
    utilisation: float
    """Share of the measured FLOP/s of all present machines that was used for committed steps."""
    member_utilisation: float
    """Share of the measured FLOP/s of the job's members that was used for committed steps."""
    attempted_steps: int
    """Committed steps plus `lost_steps`."""
    committed_steps: int
    lost_steps: int
    """Number of machine deaths at which work of the step in progress was lost."""
    epochs: int
    deaths: int
    """Number of deaths of machines, whether or not they held a part of the job."""
    member_deaths: int
    """Number of deaths of machines that held a part of the job."""
    replacements: int
    """Number of deaths after which a similar machine replaced the dead machine."""
    searches: int
    """Number of times that the planner was asked for a plan, including the first plan."""
    hours: Hours
    curve_samples_per_s: tuple[float, ...]
    """Committed samples per second, over equal parts of the time."""
