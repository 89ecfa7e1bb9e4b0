"""What this library uses of JAX beyond its stable interface.

Traced programs come from ``jax.extend.core``, which JAX offers to libraries without the promises of
``jax`` itself; tracers from ``jax.core``; memory layouts from ``jax.experimental``; messages from
process to process from the client of ``jax.distributed``, which JAX keeps in ``jax._src``. The
functions below are for these and for attributes that JAX does not document.
"""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax._src import distributed
from jax.core import Tracer
from jax.experimental.layout import Format
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)

from penzai_shard.errors import ShardingError

__all__ = [
    "LITTLE_OPTIMISED_COMPILATION",
    "UNOPTIMISED_COMPILATION",
    "ClosedJaxpr",
    "DebugInfo",
    "Format",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Tracer",
    "Var",
    "changes_form_alone",
    "children_of_node",
    "coordinator_host",
    "forget_message",
    "is_weakly_typed",
    "jaxpr_as_fun",
    "keyed_children_of_node",
    "look_for_message",
    "manual_mesh_axes",
    "memory_addresses",
    "receive_message",
    "runs_at_once",
    "scan_counts",
    "scope_path",
    "send_message",
    "source_frames",
]

LITTLE_OPTIMISED_COMPILATION: dict[str, str | bool] = {"xla_backend_optimization_level": "1"}
"""Options of XLA for a program that runs a few times on a CPU.

The later passes of the compiler take longer than they save then. On jax 0.10 values are the same to
the bit at this level, which is not so at level 0: that one forms no fused multiply-adds."""

UNOPTIMISED_COMPILATION: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""Options of XLA for a program that runs once: compiling it costs more than running it."""


def is_weakly_typed(value: Any) -> bool:
    """Whether a value's dtype gives way to that of what it is combined with.

    >>> is_weakly_typed(jax.numpy.asarray(1.0)), is_weakly_typed(jax.numpy.ones(2))
    (True, False)
    """
    return bool(getattr(value, "weak_type", False))


def runs_at_once(value: Any) -> bool:
    """Whether what is computed with a value is run at once, and not written into a program.

    So it is where ``jax.grad`` or ``jax.vmap`` follows a computation outside of ``jax.jit``.

    >>> seen = []
    >>> def square(x):
    ...     seen.append(runs_at_once(x))
    ...     return x * x
    >>> _ = jax.grad(square)(1.0), jax.vmap(square)(jax.numpy.ones(2)), jax.jit(square)(1.0)
    >>> seen
    [True, True, False]
    """
    while isinstance(value, Tracer):
        followed = "val" if type(value).__name__ == "BatchTracer" else "primal"
        if not hasattr(value, followed):
            return False
        value = getattr(value, followed)
    return True


def memory_addresses(array: jax.Array) -> frozenset[int]:
    """Where the memory of each part of an array begins that is on this process's devices.

    Two arrays share memory if they have an address in common.

    >>> array = jax.numpy.ones(2)
    >>> memory_addresses(array) == memory_addresses(jax.device_put(array, array.sharding))
    True
    """
    return frozenset(shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards)


def children_of_node(node: Any) -> tuple[Iterable[Any], Any] | None:
    """The children of a node of a pytree and what else it holds; None for a leaf.

    >>> children_of_node([1, 2]), children_of_node(1)
    (([1, 2], None), None)
    """
    return jax.tree_util.default_registry.flatten_one_level(node)


def keyed_children_of_node(node: Any) -> tuple[Iterable[Any], Any] | None:
    """The same, each child with its key, where the node's type gives keys.

    >>> keyed_children_of_node({"a": 1})
    (((DictKey(key='a'), 1),), ('a',))
    """
    found = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
    if found is not None and isinstance(node, tuple) and hasattr(node, "_fields"):
        # jax 0.10 gives every field of a named tuple the name of the first.
        keys = map(jax.tree_util.GetAttrKey, node._fields)
        return list(zip(keys, node, strict=True)), found[1]
    return found


def manual_mesh_axes() -> frozenset[str]:
    """The mesh axes that ``jax.shard_map`` has taken over where this is called.

    >>> manual_mesh_axes()
    frozenset()
    """
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


_OF_FORM_ALONE = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "expand_dims",
        "reduce_precision",
        "reshape",
        "reshard",
        "sharding_constraint",
        "squeeze",
        "transpose",
    }
)


def changes_form_alone(primitive: Any) -> bool:
    """Whether an operation changes the layout, shape or dtype of its operand, and nothing else.

    >>> program = jax.make_jaxpr(lambda x: jax.numpy.sin(x.T))(jax.numpy.ones((2, 3)))
    >>> [changes_form_alone(equation.primitive) for equation in program.eqns]
    [True, False]
    """
    return primitive.name in _OF_FORM_ALONE


def automatic_mesh_axes() -> frozenset[str]:
    """The mesh axes that a ``jax.shard_map`` around this call has left to the compiler.

    >>> automatic_mesh_axes()
    frozenset()
    """
    manual = manual_mesh_axes()
    every = jax.sharding.get_abstract_mesh().axis_names
    return frozenset(every) - manual if manual else frozenset()


def source_frames(equation: JaxprEqn) -> list[tuple[str, str, int]]:
    """File, function and line of each call that led to an operation, the innermost first.

    >>> equation = jax.make_jaxpr(lambda x: -x)(1.0).eqns[0]
    >>> {function for _, function, _ in source_frames(equation)} >= {"<lambda>"}
    True
    """
    traceback = equation.source_info.traceback
    frames: Iterable[Any] = traceback.frames if traceback else ()
    return [(frame.file_name, frame.function_name, frame.line_num) for frame in frames]


def scope_path(equation: JaxprEqn) -> str:
    """The ``jax.named_scope`` of an operation, with the transformations that it went through.

    >>> def scoped(x):
    ...     with jax.named_scope("block"):
    ...         return -x
    >>> scope_path(jax.make_jaxpr(scoped)(1.0).eqns[0])
    'block'
    """
    return str(equation.source_info.name_stack)


def scan_counts(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a ``scan`` are constants, and how many are carried from turn to turn.

    >>> program = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c + 1, c), x, None, 3))(0)
    >>> scan_counts(program.eqns[-1].params)
    (0, 1)
    """
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    # Since jax 0.12: the trees of constants, of what is carried, and of what is scanned over.
    constants, carried, _ = parameters["ft_in"].unpack()
    return len(constants), len(carried)


def coordinator_host() -> str:
    """The machine that has process 0 of this job, by the name or address that others know it by.

    Raises:
        ShardingError: There is no coordination service.
    """
    _coordination()
    address = distributed.global_state.coordinator_address or ""
    return address.rpartition(":")[0].strip("[]")


def send_message(key: str, text: str, *, replaces: bool = False) -> None:
    """Leaves a text for the other processes of the job, under a key.

    It goes through the coordination service of ``jax.distributed``, not through devices.

    Args:
        key: The key, which is used once.
        text: The text.
        replaces: Whether there may be a text under this key, which this one replaces.

    Raises:
        ShardingError: There are several processes, and no coordination service.
    """
    _coordination().key_value_set(key, text, replaces)


def receive_message(key: str, seconds: float) -> str | None:
    """The text that some process left under a key, as soon as it is there.

    Args:
        key: The key.
        seconds: How long to wait for it.

    Returns:
        The text, or None if it did not come.
    """
    client = _coordination()
    ends = time.monotonic() + seconds
    # In short turns, as Python takes notice of Ctrl-C only between them.
    while (left := ends - time.monotonic()) > 0:
        try:
            return str(client.blocking_key_value_get(key, math.ceil(1000 * min(left, _TURN))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    return None


def look_for_message(key: str) -> str | None:
    """The text that some process has left under a key, or None."""
    try:
        return str(_coordination().key_value_try_get(key))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
    return None


def forget_message(key: str) -> None:
    """Removes a text, so that a long job does not fill the memory of its first process."""
    _coordination().key_value_delete(key)


_TURN = 1.0


def _coordination() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ShardingError(
            f"this job has {jax.process_count()} processes, and no coordination service through "
            "which they could agree. Call jax.distributed.initialize() first in each of them."
        )
    return client
