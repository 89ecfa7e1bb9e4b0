"""Compiles a free function with layouts by axis name, as ``haliax.named_jit`` does."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from penzai_shard.arrays.structure import Structure, flatten, leaves_of, read_variables
from penzai_shard.errors import Problem, ShardingError
from penzai_shard.meshes import AnyMesh, auto_context
from penzai_shard.placement.place import place_tree
from penzai_shard.planning import arguments


def named_jit(
    function: Callable[..., Any],
    mesh: AnyMesh,
    rules: Any = None,
    *,
    in_rules: Any = None,
    out_rules: Any = None,
    donate_argnums: Sequence[int] = (),
) -> Callable[..., Any]:
    """Compiles a function whose arguments and results lie by axis name.

    A constructor of a model, ``optimizer.init``, a step: arguments and results may be trees of any
    library, also with functions and settings in them, which are part of the program. Arrays
    without names are left to JAX.

    Args:
        function: The function; it must not assign variables of its arguments. As by ``jax.jit``,
            numbers are traced: sizes of a model go in by ``functools.partial``.
        mesh: A mesh.
        rules: As for ``make_plan``.
        in_rules: Other rules for the arguments.
        out_rules: Other rules for the results.
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
    in_request = read(rules if in_rules is None else in_rules)
    out_request = read(rules if out_rules is None else out_rules)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def run(structure: Structure, donated: dict[int, Any], others: dict[int, Any]) -> Any:
        values = donated | others
        ordered = [values[i] for i in range(len(values))]
        given = structure.fill(ordered, live=structure.live_roles)
        with auto_context():
            args, kwargs = place_tree(given, in_request)
            before = read_variables((args, kwargs))
            result = place_tree(function(*args, **kwargs), out_request)
            after = read_variables((args, kwargs))
        if any(a is not b for a, b in zip(before, after, strict=True)):
            what = f"{function} assigns a variable of its arguments, which the call would lose"
            raise ShardingError("named_jit:", [Problem("", what, "Return the new value.")])
        leaves, own = flatten(result)
        # Arrays leave a trace together with what joins them.
        join = functools.partial(own.fill, live=own.live_roles)
        return jax.tree_util.Partial(join, [leaf.value for leaf in leaves])

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = flatten((args, kwargs))
        taken = {id(leaf.value) for i in donate_argnums for leaf in leaves_of(args[i])}
        donated = {i: leaf.value for i, leaf in enumerate(leaves) if id(leaf.value) in taken}
        others = {i: leaf.value for i, leaf in enumerate(leaves) if id(leaf.value) not in taken}
        return run(structure, donated, others)()

    return call
