"""What a tree's parameters measure, to name what an optimizer keeps of only some dimensions.

optax maps over the arrays inside of boxes, so that in a train state of Flax the optimizer's boxes
have the names of their parameters, whatever is in them: all of the parameter's dimensions, some of
them, as in adafactor and sm3, or nothing. Names alone do not say which dimensions are left; names
with the parameter's sizes do.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from penzai_shard.array_kinds import is_array_like
from penzai_shard.readers import ReadArray, foreign_nodes
from penzai_shard.rule_kinds import LogicalAxis, PositionalDimension
from penzai_shard.tree_paths import path_text

# The fields of a train state, ours or of other libraries, that hold the parameters, and what the
# optimizer keeps. The latter is also one of an optimizer of Flax NNX, in one tree with its model.
PARAMETERS = "params"
OPTIMIZER = "opt_state"


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterSizes:
    """The parameters in a tree that other libraries have put something around.

    Those in a field of their own, as train states have it, and those that are parameters anywhere.

    Attributes:
        tree: The tree.
    """

    tree: Any

    @functools.cached_property
    def _parameters(self) -> dict[str, ReadArray]:
        """Those that another library has put something around, by their path in the field."""
        return {
            path_text(key_path[1:]): held
            for key_path, _, held in self._held
            if len(key_path) > 1 and path_text(key_path[:1]) == PARAMETERS
        }

    @functools.cached_property
    def _variables(self) -> dict[str, ReadArray]:
        """Those that are parameters wherever they are, by each end of their path that only one has.

        Where in a tree its model is, an optimizer of Flax NNX does not know.
        """
        found: dict[str, list[ReadArray]] = {}
        for key_path, is_parameter, held in self._held:
            for start in range(len(key_path) if is_parameter else 0):
                found.setdefault(path_text(key_path[start:]), []).append(held)
        return {path: held[0] for path, held in found.items() if len(held) == 1}

    @functools.cached_property
    def _held(self) -> list[tuple[Any, bool, ReadArray]]:
        """What other libraries have put something around and named, and where."""
        found = []
        for key_path, reader, node in foreign_nodes(self.tree):
            held = reader.read(node)
            if is_array_like(held.data) and held.names is not None:
                is_parameter = reader.role(node) == "parameter"
                found.append((key_path, is_parameter, held.fitted()))
        return found

    def of(
        self,
        path: str,
        names: tuple[LogicalAxis | None, ...],
        shape: tuple[int, ...] | None = None,
    ) -> dict[LogicalAxis, int] | None:
        """The names and sizes of the parameter that an array of an optimizer belongs to.

        Args:
            path: Where the array is; the path ends like that of its parameter.
            names: The names of the array, which are those of its parameter.
            shape: Its shape, if it is one array.

        Returns:
            Names and sizes in order, positional dimensions as ``PositionalDimension``; None if the
            tree has no such parameter, or the array cannot belong to it.
        """
        parts = path.split("/")
        in_optimizer = parts.index(OPTIMIZER) if OPTIMIZER in parts else len(parts)
        for start in range(len(parts)):
            end = "/".join(parts[start:])
            held = self._parameters.get(end)
            if held is None and start > in_optimizer:
                held = self._variables.get(end)
            if held is None or held.names is None or held.problem:
                continue
            whole = np.shape(held.data)
            if in_optimizer == len(parts) and shape is not None and _is_of_another(shape, whole):
                continue
            if held.names[: len(names)] == names and not any(held.names[len(names) :]):
                return {
                    PositionalDimension(i) if name is None else name: size
                    for i, (name, size) in enumerate(zip(held.names, whole, strict=True))
                }
        return None


def _is_of_another(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array is of another model with the same names, such as a wider one's.

    >>> _is_of_another((8, 32), (8, 16)), _is_of_another((8, 1), (8, 16))
    (True, False)
    """
    pairs = zip(shape, whole, strict=False)
    return len(shape) == len(whole) and any(size not in (1, length) for size, length in pairs)
