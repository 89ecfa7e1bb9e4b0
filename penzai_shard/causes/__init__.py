"""Says where the layouts of a step come from, and why each of its collectives is there."""
