"""Links between machines: estimates for those that were not measured, and groups of near machines."""
