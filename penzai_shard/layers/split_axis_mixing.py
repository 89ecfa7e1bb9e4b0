"""Finding out whether a layer mixes the elements of what is split between devices.

A layer that normalises or contracts over a split logical axis gives each device a result of its
own part, of the right shape and with wrong values. The same code traced with the global lengths
and with those of one part does the same operations in the same order; one that mixes a split
dimension then mixes another number of elements.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_COLLECTIVES = ("psum", "pmax", "pmin", "all_gather", "reduce_scatter", "ppermute", "all_to_all")
_ALONG_AXES = ("reduce_", "arg")
_ALONG_ONE_AXIS = ("cum", "sort")


def mixed_lengths(whole: Any, part: Any) -> list[tuple[str, int, int]]:
    """The operations that mix more elements in the whole than in a part.

    Args:
        whole: The jaxpr of a layer with global lengths.
        part: That of the same layer with the lengths of one device's part.

    Returns:
        For each such operation its name, and the numbers of elements in the whole and in the
        part. Empty where the layer moves data between the devices itself, or does other things
        with a part than with the whole: it then knows what it does, or cannot be compared.

    >>> import jax
    >>> softmax = jax.make_jaxpr(lambda x: jax.nn.softmax(x, axis=0))
    >>> mixed_lengths(softmax(jax.numpy.ones((8, 3))), softmax(jax.numpy.ones((2, 3))))[0]
    ('reduce_max', 8, 2)
    """
    operations = list(_operations(part.jaxpr))
    if any(name.startswith(_COLLECTIVES) for name, _ in operations):
        return []
    of_part = [(name, lengths) for name, lengths in operations if lengths]
    of_whole = [(name, lengths) for name, lengths in _operations(whole.jaxpr) if lengths]
    if [name for name, _ in of_part] != [name for name, _ in of_whole]:
        return []
    return [
        (name, length, own)
        for (name, lengths), (_, own_lengths) in zip(of_whole, of_part, strict=True)
        for length, own in zip(lengths, own_lengths, strict=False)
        if own < length
    ]


def _operations(jaxpr: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each operation with the lengths of the dimensions along which it mixes elements."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, _mixing_lengths(equation)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _operations(inner)


def _mixing_lengths(equation: Any) -> tuple[int, ...]:
    name, params = equation.primitive.name, equation.params
    if not equation.invars or not hasattr(equation.invars[0].aval, "shape"):
        return ()
    shape = equation.invars[0].aval.shape
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return tuple(shape[i] for i in contracted)
    if name == "scan":
        return (params["length"],)
    if name.startswith(_ALONG_AXES) and isinstance(params, Mapping) and "axes" in params:
        return tuple(shape[i] for i in params["axes"])
    if name.startswith(_ALONG_ONE_AXIS):
        axis = params.get("axis", params.get("dimension"))
        return () if axis is None else (shape[axis],)
    return ()
