"""What is probably a mistake or a waste in how a model is laid over a mesh: ``lint``."""
