"""Where a sharding was lost on the way to a value, why, and what brings it back."""

from collections.abc import Iterator

from penzai_shard.inspection.sharding_causes.cause_finding import CauseFinder
from penzai_shard.inspection.sharding_causes.records import ShardingLoss
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.sharding_propagation import FLOW, Loss, PropagatedProgram, Standing, walk

# What a reduction leaves behind is summed up by devices: nothing is lost.
_NO_LOSS = "reduced"
_CONTESTED = ("used", "conflict")


class LossTeller:
    """Says of an array what was lost on the way to it.

    Args:
        program: The step's program after propagation.
        finder: What says where layouts come from.
    """

    def __init__(self, program: PropagatedProgram, finder: CauseFinder) -> None:
        self._program = program
        self._finder = finder
        self._known: dict[int, ShardingLoss] = {}

    def of_value(self, value: int, layer: str | None = None) -> tuple[ShardingLoss, ...]:
        """The losses on the way to a value.

        Of what another mesh axis has taken the place, as where the parts of a parameter are
        gathered, is said where it happens, and not again of all that is computed behind it.

        Args:
            value: The value.
            layer: The label of the layer that gives it, if one does.
        """
        own = {axis for axes in self._program.values[value].spec or () for axis in axes}

        def counts(loss: Loss, told: ShardingLoss) -> bool:
            if loss.kind in _CONTESTED and told.layer == layer:
                return True
            if loss.mesh_axis in own and (layer is not None or loss.result is None):
                return False
            return not told.gathered

        losses = self._program.losses(value)
        told = [(loss, self._told(loss)) for loss in losses if loss.kind != _NO_LOSS]
        return tuple(dict.fromkeys(text for loss, text in told if counts(loss, text)))

    def why_whole(self, value: int) -> str:
        """Why every device holds all of a value on whose way nothing was lost."""
        maker = self._program.makers.get(value)
        if maker is not None and maker.constraint:
            source = self._finder.cause_of_constraint(maker)
            return f"laid out so by {source}"
        sums = [loss for loss in self._program.losses(value) if loss.kind == _NO_LOSS]
        for loss in sums:
            where = self._finder.step_of(loss.operation)
            return f"devices sum up what they have over {loss.mesh_axis!r} at {where}"
        if not self._is_of_split(value):
            return "nothing that it is made of is split"
        if not self._program.values[value].shape:
            return "it is one number"
        return "of what it is made of only dimensions are split that it does not have"

    def _is_of_split(self, value: int) -> bool:
        """Whether anything that a value is computed from is split."""
        makers = self._program.makers
        before = walk([value], lambda each: makers[each].operands if each in makers else ())
        return any(any(self._program.values[each].spec or ()) for each in before)

    def _told(self, loss: Loss) -> ShardingLoss:
        if id(loss) not in self._known:
            self._known[id(loss)] = self._computed_telling(loss)
        return self._known[id(loss)]

    def _computed_telling(self, loss: Loss) -> ShardingLoss:
        operation = self._finder.step_of(loss.operation)
        logical_axis = self._finder.cause(loss.operand, loss.mesh_axis).logical_axis
        reason, fix = (
            self._reason(loss, logical_axis),
            self._fix(loss, logical_axis, operation.layer),
        )
        return ShardingLoss(
            mesh_axis=loss.mesh_axis,
            logical_axis=logical_axis,
            operation=operation.operation,
            layer=operation.layer,
            line=operation.line,
            reason=reason,
            fix=fix,
            kind=loss.kind,
            gathered=self._gathered(loss),
        )

    def _gathered(self, loss: Loss) -> str:
        """The parameter whose parts are brought together there for another use of its mesh axis."""
        is_for_use = loss.kind == "pinned" and self._finder.gathers(loss.operation)
        if not is_for_use and not (loss.kind == "used" and loss.rival_won):
            return ""
        parameter = self._finder.parameter_behind(loss.operand)
        return "" if parameter is None else parameter.path.removeprefix("params/")

    def _reason(self, loss: Loss, logical_axis: LogicalAxis | None) -> str:
        size = self._program.values[loss.operand].shape[loss.dimension]
        dimension = f"dimension {loss.dimension} of length {size}"
        if logical_axis is not None:
            dimension = f"{str(logical_axis)!r} ({size})"
        rival = " and ".join(map(repr, loss.rival.mesh_axes)) if loss.rival else ""
        behind = "".join(self._behind(loss.rival)) if loss.rival else ""
        match loss.kind:
            case "pinned" if loss.operation.constraint:
                return f"it pins another layout of {dimension}"
            case "pinned" if loss.operation.boundary:
                return f"the specs of the jax.shard_map have another layout of {dimension}"
            case "pinned":
                return f"another layout of {dimension} is declared of what comes out"
            case "used":
                return f"{rival} already splits another dimension there{behind}"
            case "conflict" if loss.rival_won:
                return f"{dimension} is on {rival} there{behind}, which came first"
            case "conflict":
                return f"{dimension} is on {rival} in another operand{behind}, and neither won"
            case "whole":
                return f"it needs {dimension} whole on every device"
            case "unruled":
                return "Shardy does not know which dimensions of it belong together"
            case "cut":
                return f"{dimension} is cut or joined there, and the parts do not fit"
            case "absent":
                return f"what comes out does not have {dimension}"
            case "uneven" if ":" in loss.mesh_axis:
                return "what comes out of a step is split over whole mesh axes alone"
            case "uneven":
                return f"what comes out of a step is split evenly, and {dimension} does not divide"
        return f"Shardy does not take it on along {dimension}"

    def _behind(self, rival: Standing) -> Iterator[str]:
        """Where what has its place comes from."""
        cause = self._finder.cause(rival.value, rival.mesh_axes[0])
        if cause.kind != "unknown":
            yield f" (from {cause.source}: {cause.reason})"

    def _fix(self, loss: Loss, logical_axis: LogicalAxis | None, layer: str) -> str:
        """What lays the array out again behind the operation, if that has the dimension still."""
        name = loss.mesh_axis.partition(":")[0]
        after = f"after {layer}" if layer else "on what it gives"
        if loss.result is None or loss.result_dimension is None:
            return ""
        if loss.kind == "pinned" and loss.operation.constraint:
            rule = f"{str(logical_axis)!r}: {name!r}" if logical_axis is not None else ""
            by_name = rule and self._finder.is_by_name(loss.operation)
            return f"Give {layer} the rule {rule}" if by_name else ""
        if loss.kind == "pinned" or loss.operation.kind == FLOW:
            return ""
        if loss.kind == "used":
            text = (
                f"Give the two dimensions different mesh axes, or pin the one that keeps {name!r}"
            )
            return text + ("" if logical_axis is None else f": {_by_name(logical_axis, name)}")
        if logical_axis is not None:
            return f"Put {_by_name(logical_axis, name)} {after}"
        spec = ", ".join(["None"] * loss.result_dimension + [repr(name)])
        return (
            f"Put jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec({spec}))) "
            f"{after}"
        )


def _by_name(logical_axis: LogicalAxis, mesh_axis: str) -> str:
    return f"ConstrainShardingByName(mesh, {{{str(logical_axis)!r}: {mesh_axis!r}}})"
