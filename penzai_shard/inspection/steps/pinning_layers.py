"""The layers that pin layouts themselves, and by which rules."""

import dataclasses
from typing import Any

from penzai_shard.axis_rules import AxisRules
from penzai_shard.layers import (
    ConstrainActivations,
    ConstrainSharding,
    ConstrainShardingByName,
    GatherParameters,
)


@dataclasses.dataclass(frozen=True)
class PinningLayer:
    """What a layer pins layouts by; nothing of its arrays.

    Attributes:
        kind: The name of its class.
        rules: The rules, in the order in which they are followed; none if it has shardings instead.
    """

    kind: str
    rules: tuple[AxisRules, ...] = ()

    @classmethod
    def of(cls, layer: Any) -> "PinningLayer | None":
        """That of a layer; None if it pins nothing itself.

        >>> from penzai_shard.meshes import make_mesh
        >>> mesh = make_mesh({"data": 8})
        >>> PinningLayer.of(ConstrainShardingByName(mesh, {"batch": "data"})).rules
        (AxisRules({'batch': 'data'}),)
        """
        given: tuple[Any, ...] = ()
        match layer:
            case ConstrainSharding():
                pass
            case ConstrainShardingByName():
                given = (layer.axis_name_to_mesh_name,)
            case ConstrainActivations():
                given = (*layer.inputs, *layer.outputs)
            case GatherParameters():
                given = (layer.rules, *(() if layer.stored is None else (layer.stored,)))
            case _:
                return None
        return cls(type(layer).__name__, tuple(map(AxisRules.of, given)))
