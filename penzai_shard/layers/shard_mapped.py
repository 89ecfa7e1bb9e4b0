"""Runs a layer per device, its parameters gathered where they are used.

The compiler partitions a program as a whole, and may move activations where moving parameters would
be cheaper. Here it is written down: every device holds its part of the batch, gathers each
parameter for as long as it is used, and scatters the gradient.

The call is traced with the lengths of the whole and with those of one device's part. If it treats
the elements of split dimensions independently, the parts of its output make the output of the
whole. Gradients are right as well: that of a gathered parameter is the sum over the devices.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import specs
from penzai_shard.arrays.kinds import is_key_type
from penzai_shard.arrays.structure import Leaf, Structure, flatten
from penzai_shard.errors import ManualRegionError, PlanError, Problem, Problems, check_arguments
from penzai_shard.jax_internals.tracing import ClosedJaxpr, is_weak_type
from penzai_shard.layers.independence import find_base_keys, find_mixing
from penzai_shard.layers.manual import device_position, manual_axes, varying_axes
from penzai_shard.layers.operation_rules import is_collective
from penzai_shard.layers.pure_call import PureCall
from penzai_shard.layers.remat import GATHERED
from penzai_shard.layers.wrapper import Call, WrapperLayer
from penzai_shard.meshes import AnyMesh, auto_context, auto_twin, on_auto_twin
from penzai_shard.planning import arguments
from penzai_shard.planning.planner import warn_of_near_names
from penzai_shard.programs import equations_in
from penzai_shard.rules import AxisRules, decide

_STATIC = {"pytree_node": False}
_KINDS = {"min_size": int, "per_device": bool, "keep_split": tuple, "assume_independent": tuple}
# The program of a call for arrays of some lengths, and the structure of its results: of the output
# and of what it assigns.
_Trace: TypeAlias = tuple[ClosedJaxpr, Structure]


@pz.pytree_dataclass
class ShardMapped(WrapperLayer):
    """Wraps a layer so that it runs per device under ``jax.shard_map``, as FSDP does.

    Output, gradients, parameter names and assignments of variables stay those of the layer. What
    changes is who moves what: each parameter is gathered where it is used, over the mesh axes that
    ``parameter_rules`` split it over, and its gradient is summed and scattered over them. The
    argument, side inputs, state variables and the output are split by ``activation_rules``; arrays
    without names are copies on every device.

    The layer must compute the elements of a split logical axis independently of each other, as a
    transformer block does with those of a batch. This is checked before anything runs, operation by
    operation: what is not known to be independent is refused, functions with their own backward
    rule (``jax.custom_vjp``) too. ``assume_independent`` names operations that you vouch for.

    A layer that moves data itself (``jax.lax.psum``, ``axis_index``, ...) is written for one
    device's part: ``per_device=True`` runs it as it is, checked by JAX (``check_vma``). Nothing
    says then what the whole layer would compute.

    Every ``pz.RandomStream`` is folded with the device's position along the mesh axes over which
    activations are split: devices draw different numbers for different parts, and the same for
    the same part. Constraint layers inside leave out the mesh axes, all of which are taken over.
    Inside another ``ShardMapped``, or under ``jax.shard_map``, the body runs bare.

    Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), stage 3; Zhao et al. 2023, "PyTorch
    FSDP" (arXiv:2304.11277); ``jax.shard_map``.

    Attributes:
        body: The layer.
        mesh: The mesh. Arrays of an Explicit mesh come out on its Auto twin.
        parameter_rules: Which logical axis of a parameter goes to which mesh axis, in any form that
            ``make_plan`` takes.
        activation_rules: The same for everything else.
        min_size: Parameters with fewer elements are copies on every device, which is cheaper than
            gathering them.
        keep_split: Logical axes over which parameters stay split inside.
        per_device: Whether the layer is written for one device's part.
        assume_independent: Names of operations, or of functions under ``jax.jit``, that treat
            elements independently.

    Raises:
        RuleTypeError, MeshError: An option cannot be read, or a rule names no axis of the mesh.
        PlanError: A length does not divide; raised by the call, as the next.
        ManualRegionError: The layer mixes elements of a split axis, moves data itself, or has an
            output that is split otherwise than ``activation_rules`` say.

    Warns:
        ShardingWarning: A rule names nearly a logical axis of what enters.

    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 8})
    >>> layer = ShardMapped(pz.nn.Softmax("embed"), mesh, {}, {"batch": "data"})
    >>> layer(pz.nx.ones({"batch": 16, "embed": 4})).data_array.sharding.spec
    P('data',)
    """

    body: Any
    mesh: AnyMesh = dataclasses.field(metadata=_STATIC)
    parameter_rules: AxisRules = dataclasses.field(metadata=_STATIC)
    activation_rules: AxisRules = dataclasses.field(metadata=_STATIC)
    min_size: int = dataclasses.field(default=0, metadata=_STATIC)
    keep_split: tuple[Hashable, ...] = dataclasses.field(default=(), metadata=_STATIC)
    per_device: bool = dataclasses.field(default=False, metadata=_STATIC)
    assume_independent: tuple[str, ...] = dataclasses.field(default=(), metadata=_STATIC)

    def __post_init__(self) -> None:
        for key in ("parameter_rules", "activation_rules"):
            self.__dict__[key] = arguments.read("ShardMapped", self.mesh, getattr(self, key)).rules
        # A text in place of a tuple of names would be taken for its letters.
        checks = {}
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            checks[name] = value, isinstance(value, kind), f"a {kind.__name__}, such as {kind()}"
        check_arguments("ShardMapped", checks)

    def _transform(self, call: Call, structure: Structure) -> Call:
        # What is around has taken over the mesh axes, and the body gets a part already.
        if manual_axes():
            return call
        assert isinstance(call, PureCall)
        # The body is in the call.
        region = dataclasses.replace(self, body=None, mesh=auto_twin(self.mesh))

        def run(values: Sequence[Any]) -> tuple[Any, dict[int, Any]]:
            structure, arrays = _run_per_device(region, call, list(values))
            tree = structure.fill_alike(arrays)
            return tree["output"], tree["assigned"]

        return run


# A call per device


class _Crossing(NamedTuple):
    """An array that enters a region or leaves it.

    Attributes:
        leaf: The array, with its length outside.
        mesh_axes: The mesh axes of each of its dimensions, outside.
        whole: Which dimensions every device holds whole inside.
    """

    leaf: Leaf
    mesh_axes: tuple[tuple[str, ...], ...]
    whole: frozenset[int] = frozenset()

    @property
    def mesh_axes_inside(self) -> tuple[tuple[str, ...], ...]:
        return tuple(() if i in self.whole else axes for i, axes in enumerate(self.mesh_axes))

    def name(self, dim: int) -> Hashable | None:
        return self.leaf.names[dim] if self.leaf.names else None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_per_device(
    region: ShardMapped, call: PureCall, values: Sequence[Any]
) -> tuple[Structure, list[Any]]:
    """Runs a call per device.

    It is compiled, as a region would be traced anew at every call otherwise.

    Args:
        region: How: the layer without its body.
        call: The call.
        values: Its arrays.

    Returns:
        The output and what the call assigns, taken apart.

    Raises:
        PlanError: A length does not divide.
        ManualRegionError: The call mixes elements of a split dimension, or cannot run on a part.
    """
    with auto_context():
        values = on_auto_twin(values)
        run = _Run(region, call, values)
        found: list[tuple[_Trace, list[_Crossing]]] = []

        # In a region already, as constraint layers leave out the mesh axes that it takes over.
        def check(*parts: Any) -> list[Any]:
            part = run.trace(run.enter(parts))
            read = run.read_outputs if region.per_device else run.check_independence
            found.append((part, read(part)))
            return []

        jax.eval_shape(run.map_parts(check, []), *values)
        (((_, structure), outputs),) = found

        def compute(*parts: Any) -> list[Any]:
            _, results = run.body(run.enter(parts))
            return [_cut(region, *pair) for pair in zip(outputs, results, strict=True)]

        return structure, run.map_parts(compute, outputs)(*values)


class _Run:
    """One call in one region.

    Attributes:
        inputs: What enters.
        keys: Which of it are base keys of random streams that differ between devices.
        random_axes: The mesh axes along which these differ: those that activations are split over.
        body: The call, from arrays of any lengths to the structure of its results and their arrays.
    """

    def __init__(self, region: ShardMapped, call: PureCall, values: Sequence[Any]) -> None:
        self._region, self._call = region, call
        self._parts = functools.partial(specs.part_count, mesh_sizes=region.mesh.shape)
        # Whether JAX keeps account of what varies. What is checked here needs no check by JAX.
        self._is_tracked = region.per_device
        tree = call.structure.fill(values)
        leaves, _ = flatten(tree)
        names = {name for leaf in leaves for name in leaf.names or ()}
        warn_of_near_names("ShardMapped", region.parameter_rules | region.activation_rules, names)
        problems = Problems("no valid layout for what enters the region:")
        self.inputs = [_lay_out(region, leaf, problems) for leaf in leaves]
        problems.raise_if_any(PlanError)

        # The names of split dimensions, and the mesh axes over which they are split inside.
        self._splits = {
            (one.name(i), axes)
            for one in self.inputs
            for i, axes in enumerate(one.mesh_axes_inside)
            if self._parts(axes) > 1
        }
        activations = [one for one in self.inputs if not _is_parameter(one.leaf)]
        used = {axis for one in activations for axes in one.mesh_axes for axis in axes}
        sizes = region.mesh.shape.items()
        self.random_axes = tuple(axis for axis, size in sizes if axis in used and size > 1)
        keys = find_base_keys(tree, leaves)
        self.keys = [is_key and bool(self.random_axes) for is_key in keys]

        def body(values: Sequence[Any]) -> tuple[Structure, list[Any]]:
            output, assigned = call(values)
            leaves, structure = flatten({"output": output, "assigned": assigned})
            return structure, [leaf.value for leaf in leaves]

        # In line, it leaves no trace in the program.
        self.body = jax.jit(body, inline=True)

    def enter(self, parts: Sequence[Any]) -> list[Any]:
        """The arrays of the call inside, from one device's part of each."""
        entered = []
        for one, part, is_key in zip(self.inputs, parts, self.keys, strict=True):
            array = _gather(one, part, self.random_axes, self._is_tracked)
            if is_key:
                array = jax.random.fold_in(array, device_position(self.random_axes))
            entered.append(array)
        return entered

    def trace(self, values: Sequence[Any]) -> _Trace:
        """The call with arrays of any lengths.

        Raises:
            ManualRegionError: It fails, and does not with whole arrays.
        """
        try:
            traced = self.body.trace(values)
        except Exception as error:
            self.body.trace(self._structs({}))  # Its own error, if it fails with whole arrays too.
            what = f"it runs on whole arrays only ({type(error).__name__}, see above)"
            fix = "Map what the layer needs whole to None in activation_rules."
            problem = Problem("", what, fix)
            raise ManualRegionError("the layer cannot run per device:", [problem]) from error
        return traced.jaxpr, traced.out_info[0]

    def map_parts(self, function: Callable[..., Any], outputs: Sequence[_Crossing]) -> Any:
        """A function of one device's parts as one of whole arrays."""
        return jax.shard_map(
            function,
            mesh=self._region.mesh,
            in_specs=tuple(specs.canonical(one.mesh_axes) for one in self.inputs),
            out_specs=[specs.canonical(one.mesh_axes) for one in outputs],
            check_vma=self._is_tracked,
        )

    def read_outputs(self, part: _Trace) -> list[_Crossing]:
        """How the results leave of a layer that is written for one device's part.

        A dimension that the rules split is a part, unless JAX knows that all devices hold the same.

        Raises:
            ManualRegionError: A result differs between devices that should hold the same.
        """
        (program, structure), outputs = part, []
        longest = [[n * self._region.mesh.size for n in kind.shape] for kind in program.out_avals]
        results = self._lay_out_results(structure, longest)
        problems = Problems("the layer cannot run per device:")
        for kind, one in zip(program.out_avals, results, strict=True):
            varying = varying_axes(kind)
            whole = frozenset(i for i, axes in enumerate(one.mesh_axes) if not varying >= {*axes})
            one = one._replace(whole=whole)
            counts = map(self._parts, one.mesh_axes_inside)
            shape = tuple(map(math.prod, zip(kind.shape, counts, strict=True)))
            leaf = dataclasses.replace(one.leaf, shape=shape)
            outputs.append(one._replace(leaf=leaf))
            if axes := tuple(sorted(varying.difference(*one.mesh_axes_inside))):
                what = f"it differs along {axes}, over which activation_rules do not split it"
                fix = f"Sum it, jax.lax.psum(x, {axes}), or all_gather(..., to='invarying')."
                problems.add(leaf.path, what, fix)
        problems.raise_if_any(ManualRegionError)
        return outputs

    def check_independence(self, part: _Trace) -> list[_Crossing]:
        """How the results leave of a layer that treats elements independently.

        Raises:
            ManualRegionError: It does not.
        """
        whole, longest, times = self._trace_wholes()
        parts = {self._parts(axes) * n: axes for axes, n in times.items()}
        text = ", ".join(sorted(f"{name!r} over {axes}" for name, axes in self._splits))
        problems = Problems(f"the layer does not treat split axes ({text}) independently:")
        if any(structure != part[1] for _, structure in (whole, longest)):
            what = "the output is another tree for a part than for the whole"
            problems.add("output", what, "Map what decides it to None in activation_rules.")

        # The real whole must be a part of the longest too: a program may do something else at its
        # exact length. Both draw the numbers of the whole.
        vouched = frozenset(self._region.assume_independent)
        traces = longest[0], part[0]
        # Along a mesh axis of length 1 nothing is split.
        sizes = self._region.mesh.shape
        long = {n: tuple(axis for axis in axes if sizes[axis] > 1) for n, axes in parts.items()}
        axes = frozenset(self.random_axes)
        is_random, mixing = find_mixing(*traces, long, self.keys, random_axes=axes, vouched=vouched)
        if longest is not whole:
            longer = {n: axes for axes, n in times.items() if n > 1}
            mixing += find_mixing(longest[0], whole[0], longer, self.keys, vouched=vouched)[1]
        # Whoever moves data does not expect to be told what else mixes.
        collectives = [one for one in mixing if is_collective(one.kind)]
        # One message for all operations of a layer that mix in the same way.
        kinds: dict[tuple[str, str], list[str]] = {}
        for one in dict.fromkeys(collectives or mixing):
            kinds.setdefault((one.path, one.what), []).append(one.kind)
        for (path, what), own in kinds.items():
            fix = f"Do it outside, map its axis to None, or assume_independent={(*own,)}."
            if collectives:
                fix = "Write per_device=True: the layer is written for one device's part."
            problems.add(path, f"{what} ({', '.join(map(repr, own))})", fix)
        problems.raise_if_any(ManualRegionError)
        # Somebody vouches for it. JAX splits the cotangent of what it does not track among devices
        # that hold the same, and a rule that is not linear, such as a clip, would see a fraction.
        names = {equation.primitive.name for equation in equations_in(part[0])}
        self._is_tracked = "custom_vjp_call" in names
        return self._match_results((whole, longest, part), parts, is_random)

    def _structs(self, times: Mapping[tuple[str, ...], int]) -> list[jax.ShapeDtypeStruct]:
        """The types of whole arrays, longer where they are split over some mesh axes."""
        # JAX reshards what is on another mesh (``jnp.where`` does), and so the traces would differ.
        sharding, structs = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec()), []
        for leaf, mesh_axes in ((one.leaf, one.mesh_axes_inside) for one in self.inputs):
            pairs = zip(leaf.shape, mesh_axes, strict=True)
            shape = [length * times.get(axes, 1) for length, axes in pairs]
            options = {"weak_type": is_weak_type(leaf.value), "sharding": sharding}
            structs.append(jax.ShapeDtypeStruct(shape, leaf.dtype, **options))
        return structs

    def _trace_wholes(self) -> tuple[_Trace, _Trace, dict[tuple[str, ...], int]]:
        """The call with whole lengths, and with lengths by which split axes can be told apart.

        Dimensions are told apart by how many parts they have. Where two have equally many, the
        second whole is longer in some, as many times as is said for the mesh axes.
        """
        times: dict[tuple[str, ...], int] = {}
        counts: set[int] = set()
        for axes in sorted({axes for _, axes in self._splits}):
            count, taken = self._parts(axes), {*times.values()} - {1}
            free = (n for n in itertools.count(1) if count * n not in counts and n not in taken)
            times[axes] = next(free)
            counts.add(count * times[axes])
        whole = longest = self.trace(self._structs({}))
        if any(n > 1 for n in times.values()):
            longest = self.trace(self._structs(times))
        return whole, longest, times

    def _match_results(
        self, traces: Sequence[_Trace], parts: Mapping[Any, Any], is_random: Sequence[bool]
    ) -> list[_Crossing]:
        """Results, split inside as they are split outside, or whole inside."""
        whole, *others = ([kind.shape for kind in program.out_avals] for program, _ in traces)
        results = self._lay_out_results(traces[0][1], whole)
        problems, outputs = Problems("the layer cannot run per device:"), []
        for one, *shapes, differs in zip(results, *others, is_random, strict=True):
            pairs = zip(*shapes, strict=True)
            inside = [() if long == short else parts.get(long / short) for long, short in pairs]
            kept = frozenset(i for i, axes in enumerate(inside) if axes == ())
            outputs.append(one._replace(whole=kept))
            for i, axes in enumerate(inside):
                if axes != () and axes != one.mesh_axes[i]:
                    what = f"dimension {i} ({one.name(i)!r}) is split over {axes} inside only"
                    fix = f"Keep its name, and map it to {axes} in activation_rules."
                    problems.add(one.leaf.path, what, fix)
                elif shapes[-1][i] * self._parts(axes) != one.leaf.shape[i]:
                    what = f"the parts of dimension {i} do not make {one.leaf.shape[i]} elements"
                    problems.add(one.leaf.path, what, "Let it be as long as a split axis.")
            if differs:
                what = "it is made of random numbers that differ between devices"
                problems.add(one.leaf.path, what, "Leave it out of the output.")
        problems.raise_if_any(ManualRegionError)
        return outputs

    def _lay_out_results(
        self, structure: Structure, shapes: Sequence[Sequence[int]]
    ) -> list[_Crossing]:
        """Where the rules for activations say that the results lie outside."""
        problems = Problems("no valid layout for what leaves the region:")
        own, results = self._call.structure, []
        for path, names, shape in zip(structure.paths, structure.names, shapes, strict=True):
            first, number = [*path.split("/"), ""][:2]
            if first == "assigned":
                path = ", ".join(own.paths[own.variables[int(number)].leaves]) or path
            leaf = Leaf(path, names, tuple(shape), None, None, role="state")
            results.append(_lay_out(self._region, leaf, problems))
        problems.raise_if_any(PlanError)
        return results


def _is_parameter(leaf: Leaf) -> bool:
    """Whether rules for parameters hold: also for arrays of the layer of no known role."""
    return leaf.role == "parameter" or (not leaf.role and leaf.path.startswith("body/"))


def _lay_out(region: ShardMapped, leaf: Leaf, problems: Problems) -> _Crossing:
    """How an array lies outside; a parameter is whole inside, unless some of it stays split."""
    rules, whole, is_small = region.activation_rules, frozenset[int](), False
    if _is_parameter(leaf):
        rules, names = region.parameter_rules, leaf.names or (None,) * len(leaf.shape)
        whole = frozenset(i for i, name in enumerate(names) if name not in region.keep_split)
        # What stays split is counted on to be so, however small it is.
        is_small = len(whole) == len(names) and math.prod(leaf.shape) < region.min_size
    if is_small or is_key_type(leaf.dtype):
        return _Crossing(leaf, ((),) * len(leaf.shape), whole)
    sizes = region.mesh.shape
    decision = decide(rules.on(sizes), leaf.names, leaf.shape, tuple(sizes.items()))
    problems.extend(dataclasses.replace(one, path=leaf.path) for one in decision.problems)
    return _Crossing(leaf, decision.mesh_axes, whole)


def _gather(one: _Crossing, part: Any, random_axes: Sequence[str], is_tracked: bool) -> Any:
    """An array as it is inside, from one device's part; transposed, a sum that is scattered."""
    for dim in sorted(one.whole):
        axes = one.mesh_axes[dim]
        if axes and not is_tracked:
            part = jax.lax.all_gather(part, axes, axis=dim, tiled=True)
        # To JAX an array varies only where activations do. Parts along the last of the mesh axes
        # are neighbours.
        for axis in reversed(axes) if is_tracked else ():
            to = "varying" if axis in random_axes else "invarying"
            part = jax.lax.all_gather(part, axis, axis=dim, tiled=True, to=to)
    return checkpoint_name(part, GATHERED) if one.whole else part


def _cut(region: ShardMapped, one: _Crossing, array: Any) -> Any:
    """A device's part of what it computed."""
    for dim in sorted(one.whole):
        if axes := one.mesh_axes[dim]:
            size = one.leaf.shape[dim] // specs.part_count(axes, region.mesh.shape)
            start = device_position(axes) * size
            array = jax.lax.dynamic_slice_in_dim(array, start, size, dim)
    return array
