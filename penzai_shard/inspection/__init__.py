"""What a step costs before it runs: collectives, memory, absent devices, and locks on all of it."""
