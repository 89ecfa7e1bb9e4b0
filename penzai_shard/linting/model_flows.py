"""What flows through the layers of a model, found by tracing it: nothing is run.

Layers of this library that change how a model runs, and not what it computes, are passed by: what
flows through the layer in them is the same, and a constraint that does not fit must not keep what
comes after it from being seen.
"""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.equinox_modules import are_arrays
from penzai_shard.inspection.steps.layer_labels import layer_labels
from penzai_shard.inspection.steps.layer_scopes import DisguisedLayer
from penzai_shard.layers import (
    AxesInPlace,
    Checkpointed,
    ConstrainActivations,
    ConstrainSharding,
    ConstrainShardingByName,
    GatherParameters,
    Jitted,
    ShardMapped,
)
from penzai_shard.layers.shard_mapped import taken_over
from penzai_shard.library_apis.jax_api import manual_mesh_axes
from penzai_shard.linting.split_axes import axis_sizes
from penzai_shard.meshes import auto_context
from penzai_shard.model_variables import thawed
from penzai_shard.model_variables.slots import StaticLeaf, fill_slots
from penzai_shard.named_leaves import leaves_of
from penzai_shard.placement import described_array
from penzai_shard.planning.plan import itemsize
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.surgery.bare_paths import bare_paths, layer_name
from penzai_shard.surgery.places import find_predicate
from penzai_shard.surgery.rewriting import Rewriter
from penzai_shard.surgery.tree_nodes import Keys, is_layer, keys_text

PASSERS = (ConstrainSharding, ConstrainShardingByName)
"""Layers that only pin what flows through them."""

# Wrappers whose body computes the same without them.
_RUNNING = (AxesInPlace, Checkpointed, GatherParameters, Jitted)


@dataclasses.dataclass(frozen=True)
class FlowingArray:
    """An array that goes into a layer or comes out of it.

    Attributes:
        names: The logical axis of each dimension, None for a positional one; None altogether for
            an array without names.
        shape: Its shape.
        dtype: Its dtype.
        value: Which value it is: arrays with equal numbers are the same one.
    """

    names: tuple[LogicalAxis | None, ...] | None
    shape: tuple[int, ...]
    dtype: Any
    value: int

    @property
    def sizes(self) -> dict[LogicalAxis, int]:
        """The lengths of its logical axes."""
        return axis_sizes(self.names, self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclasses.dataclass
class LayerCall:
    """One call of a layer.

    Attributes:
        layer: The layer, as it is in the model.
        place: Its path in the model as it is, for edits.
        label: What people call it.
        around: The number of the call that it was called in; None for that of the model.
        inputs: The arrays that went in, without side inputs.
        outputs: The arrays that came out; empty if it failed.
        manual: The mesh axes that a surrounding ``jax.shard_map`` has taken over.
    """

    layer: Any
    place: str
    label: str
    around: int | None
    inputs: tuple[FlowingArray, ...]
    outputs: tuple[FlowingArray, ...] = ()
    manual: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class ModelFlows:
    """What flows through a model.

    Attributes:
        calls: Every call of a layer, in the order in which they began.
        error: What went wrong, if the model cannot be called so.
        failed: The call in which it did.
    """

    calls: tuple[LayerCall, ...]
    error: Exception | None = None
    failed: LayerCall | None = None


@dataclasses.dataclass(eq=False)
class _Recorder:
    """Notes what goes into the layers of one model and comes out of them."""

    layers: list[tuple[Any, str, str]] = dataclasses.field(default_factory=list)
    calls: list[LayerCall] = dataclasses.field(default_factory=list)
    running: list[int] = dataclasses.field(default_factory=list)
    failed: LayerCall | None = None
    # Values by their ids, which must not be used again.
    values: dict[int, Any] = dataclasses.field(default_factory=dict)

    def marked(self, model: Any) -> Any:
        """The model with layers that report to this."""
        labels, bare = layer_labels(model), bare_paths(model)

        def recorded(layer: Any, keys: Keys) -> tuple[Any, ...]:
            place = keys_text(keys)
            label = labels.get(place) or bare[place] or layer_name(layer)
            self.layers.append((layer, place, label))
            return (_RecordedLayer(layer, label, self, len(self.layers) - 1),)

        return Rewriter(
            find_predicate(is_layer, layers_only=True),
            recorded,
            same_everywhere=False,
            enters=lambda layer: True,
        ).run(model)

    def arrays(self, tree: Any) -> tuple[FlowingArray, ...]:
        """The arrays of a tree."""
        found = []
        for leaf in leaves_of(tree):
            if leaf.dtype is None:
                continue
            self.values[id(leaf.array)] = leaf.array
            found.append(FlowingArray(leaf.names, leaf.shape, leaf.dtype, id(leaf.array)))
        return tuple(found)

    @contextlib.contextmanager
    def call(self, number: int, inputs: Any) -> Iterator[LayerCall]:
        """A call of a layer; the block says what comes out."""
        layer, place, label = self.layers[number]
        around = self.running[-1] if self.running else None
        manual = manual_mesh_axes()
        if around is not None:
            outer = self.calls[around]
            manual |= outer.manual | _taken_over(outer.layer)
        self.calls.append(
            LayerCall(layer, place, label, around, self.arrays(inputs), manual=manual)
        )
        self.running.append(len(self.calls) - 1)
        call = self.calls[-1]
        try:
            yield call
        except Exception:
            self.failed = self.failed or call
            raise
        finally:
            self.running.pop()


def _taken_over(layer: Any) -> frozenset[str]:
    """The mesh axes that a layer takes over for what is in it."""
    return frozenset(taken_over(layer) if isinstance(layer, ShardMapped) else ())


@pz.pytree_dataclass(has_implicitly_inherited_fields=True)
class _RecordedLayer(DisguisedLayer):
    """A layer that reports its calls."""

    recorder: _Recorder = dataclasses.field(metadata={"pytree_node": False})
    number: int = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, /, *arguments: Any, **options: Any) -> Any:
        recorder: _Recorder = self.__dict__["recorder"]
        with recorder.call(self.__dict__["number"], arguments) as call:
            output = _run(self.__dict__["body"], arguments, options)
            call.outputs = recorder.arrays(output)
        return output


def _run(layer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What a layer computes, without what only changes how it runs."""
    if isinstance(layer, PASSERS):
        return _as_new_values(arguments[0])
    if isinstance(layer, ConstrainActivations):
        first, *others = map(_as_new_values, arguments)
        return layer.body(first, *others, **options)
    if isinstance(layer, _RUNNING) or (isinstance(layer, ShardMapped) and not layer.per_device):
        return layer.body(*arguments, **options)
    return layer(*arguments, **options)


def _as_new_values(tree: Any) -> Any:
    """The same tree, of values that are not those from before it was pinned."""
    return jax.tree_util.tree_map(jax.lax.optimization_barrier, tree)


def flows_through(model: Any, batch: Any) -> ModelFlows:
    """Traces a model, and says what flows through each of its layers.

    Args:
        model: The model, concrete or abstract; it stays as it is.
        batch: What it is called with, as for ``lint``.

    Returns:
        What flows, as far as it could be traced.

    >>> model = pz.nn.Sequential([pz.nn.Identity()])
    >>> flows = flows_through(model, pz.nx.ones({"batch": 4}))
    >>> [(call.label, call.outputs[0].sizes) for call in flows.calls]
    [('sequential', {'batch': 4}), ('sublayers/0', {'batch': 4})]
    """
    recorder = _Recorder()
    args, kwargs = inputs_of(model, batch)
    # Side inputs may hold variables too, such as a stream of random keys.
    tree, variables = pz.unbind_variables((recorder.marked(model), args, dict(kwargs)))
    given = tree, [variable.freeze() for variable in variables]
    leaves, structure = jax.tree_util.tree_flatten(given)
    arrays = [
        described_array(leaf, None) if is_array and is_array_like(leaf) else StaticLeaf(leaf)
        for leaf, is_array in zip(leaves, are_arrays(given), strict=True)
    ]

    def run(arguments: Any) -> None:
        tree, frozen = fill_slots(arguments, {})
        called, args, kwargs = pz.bind_variables(tree, list(map(thawed, frozen)))
        called(*args, **kwargs)

    error = None
    try:
        with auto_context():
            jax.eval_shape(run, jax.tree_util.tree_unflatten(structure, arrays))
    except Exception as raised:  # A layer may fail in any way.
        error = raised
    recorder.values.clear()
    return ModelFlows(tuple(recorder.calls), error, recorder.failed)


def inputs_of(model: Any, batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a model's call, and its side inputs.

    Args:
        model: The model.
        batch: One input; a tuple of inputs, whose last may be a dictionary of side inputs; or a
            dictionary, of which the first entry is the argument where the model has no parameter
            of its name, and all others are side inputs.

    >>> inputs_of(pz.nn.Identity(), {"x": 1, "mask": 2}), inputs_of(pz.nn.Identity(), (1, {"m": 2}))
    (((1,), {'mask': 2}), ((1,), {'m': 2}))
    """
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        *args, last = batch if batch else ((),)
        if args and type(last) is dict:
            return tuple(args), last
        return batch, {}
    if type(batch) is not dict or not batch:
        return (batch,), {}
    first, *_ = batch
    named = None
    with contextlib.suppress(TypeError, ValueError):
        named = inspect.signature(type(model).__call__).parameters.get(first)
    if named is not None and named.kind is not named.POSITIONAL_ONLY:
        return (), batch
    return (batch[first],), {name: value for name, value in batch.items() if name != first}
