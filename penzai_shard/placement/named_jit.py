"""Compiles a free function with layouts by axis name, as ``haliax.named_jit`` does."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.structure import Structure, flatten, leaves_of, read_variables
from penzai_shard.errors import Problem, ShardingError
from penzai_shard.meshes import AnyMesh, auto_context
from penzai_shard.placement.place import check_devices, place_tree
from penzai_shard.planning import arguments


def named_jit(
    function: Callable[..., Any],
    mesh: AnyMesh,
    rules: Any = None,
    *,
    in_rules: Any = None,
    out_rules: Any = None,
    donate_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Compiles a function whose arguments and results lie by axis name.

    A constructor of a model, ``optimizer.init``, a function of a few calls: arguments and results
    may be trees of any library, also with functions and settings in them, which are part of the
    program. Each call takes its arguments apart, in some 50 us for each array.
    Arrays without names are left to JAX.

    Args:
        function: The function; it must not assign variables of its arguments. As by ``jax.jit``,
            numbers are traced: sizes of a model go in by ``functools.partial``.
        mesh: A mesh.
        rules: Where the results lie, as for ``make_plan``.
        in_rules: Where the arguments are laid; without these they stay where they are.
        out_rules: Another name for ``rules``.
        donate_argnums: Which arguments' memory the results may take.

    Raises:
        PlanError, MeshError, RuleTypeError: As ``make_plan``; those of arrays when it is called.

    >>> from penzai import pz
    >>> import penzai_shard as pzs
    >>> make = named_jit(lambda: pz.nx.ones({"in": 16}), pzs.make_mesh({"data": 8}), {"in": "data"})
    >>> make().data_array.sharding.spec
    P('data',)
    """
    read = functools.partial(arguments.read, "named_jit", mesh, on_unnamed="infer")
    in_request = None if in_rules is None else read(in_rules)
    out_request = read(rules if out_rules is None else out_rules)
    check_devices(out_request)
    # Taken apart, arguments are one for JAX, so that donation is by array.
    positions = {donate_argnums} if isinstance(donate_argnums, int) else {*donate_argnums}

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def run(structure: Structure, donated: dict[int, Any], others: dict[int, Any]) -> Any:
        values = donated | others
        ordered = [values[i] for i in range(len(values))]
        given = structure.fill_alike(ordered)
        with auto_context():
            args, kwargs = given if in_request is None else place_tree(given, in_request)
            # By constraints: what results there are is known in the trace only.
            before = read_variables((args, kwargs))
            result = place_tree(function(*args, **kwargs), out_request)
            after = read_variables((args, kwargs))
        if [*map(id, before)] != [*map(id, after)]:
            what = f"{function} assigns a variable of its arguments, which the call would lose"
            fix = "Leave the assignment out, and return what it would assign."
            raise ShardingError("named_jit:", [Problem("", what, fix)])
        leaves, own = flatten(result)
        return own, [leaf.value for leaf in leaves]

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = run_inputs((args, kwargs), "named_jit")
        values = [leaf.value for leaf in leaves]
        # JAX refuses to take the memory of an array that stands in another place too.
        given = (leaves_of(arg) for i, arg in enumerate(args) if i in positions)
        taken = {id(leaf.value) for leaves in given for leaf in leaves}
        donated = {i: value for i, value in enumerate(values) if id(value) in taken}
        others = {i: value for i, value in enumerate(values) if id(value) not in taken}
        own, results = run(structure, donated, others)
        return own.fill_alike(results)

    return call
