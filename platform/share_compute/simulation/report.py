"""What a simulation tells."""

from __future__ import annotations

from share_compute.strict import StrictModel


class Hours(StrictModel):
    """Where the time of a job went; all in seconds, together the whole simulation."""

    computing_s: float = 0.0
    """Steps that were committed, and the one in progress at the end."""
    redoing_s: float = 0.0
    """Work of steps that a death made void."""
    noticing_s: float = 0.0
    planning_s: float = 0.0
    moving_s: float = 0.0
    """State over links, and members that start."""
    waiting_s: float = 0.0
    """The machines that were there could not hold the job."""

    @property
    def total_s(self) -> float:
        """The whole simulation."""
        return float(sum(self.model_dump().values()))


class SimulationReport(StrictModel):
    """A job on a fleet, over simulated hours."""

    machines: int
    mean_machines: float
    """There on average."""
    mean_members: float
    """Of them, those that held a part of the job, on average."""
    simulated_s: float
    seed: int
    layers: int
    parameters: int
    microbatches: int
    first_step_s: float
    """Predicted step of the first plan."""
    samples_per_s: float
    """Committed, over the whole time."""
    tokens_per_s: float
    utilisation: float
    """Share of the FLOP/s of all machines that were there that went into committed steps."""
    member_utilisation: float
    """The same of those that held a part of the job."""
    attempted_steps: int
    """Begun and ended: committed or lost."""
    committed_steps: int
    lost_steps: int
    """In progress at a death, and done again."""
    epochs: int
    deaths: int
    """Of machines, whether they held something or not."""
    member_deaths: int
    """Of machines that held a part of the job."""
    replacements: int
    """Deaths after which a machine alike took over the place."""
    searches: int
    """Times that the planner searched."""
    hours: Hours
    curve_samples_per_s: tuple[float, ...]
    """Committed samples a second, over equal parts of the time."""
