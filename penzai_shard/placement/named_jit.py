"""Compiles a free function with layouts by axis name, as ``haliax.named_jit`` does."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from penzai_shard.arrays.structure import Structure, flatten, read_variables
from penzai_shard.errors import Problem, ShardingError
from penzai_shard.meshes import AnyMesh, auto_context
from penzai_shard.planning import arguments
from penzai_shard.placement.place import place_tree


@jax.tree_util.register_pytree_node_class
class _Result:
    """Arrays that leave a trace together with the structure of their tree."""

    def __init__(self, values: Sequence[Any], structure: Structure) -> None:
        self.values, self.structure = values, structure

    def tree_flatten(self) -> tuple[Sequence[Any], Structure]:
        return self.values, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Structure, values: Sequence[Any]) -> "_Result":
        return cls(values, structure)


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
        function: The function; it must not assign variables of its arguments.
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

    @functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=1)
    def run(donated: Structure, donated_values: Any, rest: Structure, rest_values: Any) -> _Result:
        with auto_context():
            pair = (donated.fill(donated_values, live=_ROLES), rest.fill(rest_values, live=_ROLES))
            (some, (others, kwargs)) = place_tree(pair, in_request)
            before = read_variables((some, others, kwargs))
            args = [some[i] if i in some else others[i] for i in range(len(some) + len(others))]
            result = place_tree(function(*args, **kwargs), out_request)
            after = read_variables((some, others, kwargs))
        if any(a is not b for a, b in zip(before, after, strict=True)):
            what = f"{function} assigns a variable of its arguments, which the call would lose"
            fix = "Return the new value."
            raise ShardingError("named_jit:", [Problem("", what, fix)])
        leaves, structure = flatten(result)
        return _Result([leaf.value for leaf in leaves], structure)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        some = {i: arg for i, arg in enumerate(args) if i in donate_argnums}
        others = {i: arg for i, arg in enumerate(args) if i not in donate_argnums}
        taken = (flatten(some), flatten((others, kwargs)))
        flat = [part for leaves, rest in taken for part in (rest, [x.value for x in leaves])]
        result = run(*flat)
        return result.structure.fill(result.values, live=_live_roles(result.structure))

    return call


_ROLES = ("parameter", "state")


def _live_roles(structure: Structure) -> set[str]:
    return {variable.role for variable in structure.variables if variable.live}
