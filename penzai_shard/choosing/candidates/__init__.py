"""The sane ways to lay out a training step, enumerated."""

from penzai_shard.choosing.candidates.candidate import Candidate, PaddedAxis
from penzai_shard.choosing.candidates.enumerating import Candidates, candidates
from penzai_shard.choosing.candidates.mesh_shapes import mesh_shapes

__all__ = ["Candidate", "Candidates", "PaddedAxis", "candidates", "mesh_shapes"]
