"""Knows the readers of all libraries, and which of them opens the nodes of a type.

A library keeps its arrays in nodes: a box with names, a variable, an array type, a module. A reader
opens such a node and closes another like it. Penzai is one of these libraries. A library is looked
up, never imported: nobody has its nodes who has not imported it. Its module here has its name, with
``_`` for a dot, and a list ``READERS``.
"""

import contextlib
import dataclasses
import functools
import importlib
import pathlib
import pkgutil
import sys
from collections.abc import Hashable
from typing import Any, Protocol

from penzai_shard.errors import Problem, RuleTypeError

# Types of these modules are nobody's, and by far the most frequent.
_PLAIN_MODULES = frozenset({"builtins", "collections", "numpy", "jaxlib._jax", "jax._src.core"})
# The modules of this folder, by the library that each reads: ``flax_nnx`` reads ``flax.nnx``.
_OURS = {
    module.name.replace("_", "."): f"{__package__}.{module.name}"
    for module in pkgutil.iter_modules([str(pathlib.Path(__file__).parent)])
    if f"{__package__}.{module.name}" != __name__
}
# Modules of these types keep settings in the tree, such as the rate of a dropout: as for Equinox
# itself (``eqx.is_array``), Python numbers in them are no arrays.
_MODULE_TYPES = {"penzai.core.struct": "Struct", "equinox": "Module"}


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """What a node holds.

    Attributes:
        data: An array, or a tree with further arrays in it.
        template: All that ``close`` needs besides data: plain values that can be compared, never
            the node. None puts the data itself in the place of the node.
        names: The logical axis of each dimension of ``data``, None for a positional one; None
            altogether where the node gives no names.
        sizes: The lengths that the names stand for, where the data does not tell: it has no shape,
            or is a statistic with another shape than the array that the names were given to.
        label: The path that the node itself gives, as Penzai's variables do.
        role: ``"parameter"`` or ``"state"``, if the library says so.
        identity: Equal for two nodes that are one variable; None for plain values.
        is_plain: Whether code of the library computes with the data, without the node.
        problem: Why the names cannot be used, and a fix.
    """

    data: Any
    template: Any = None
    names: tuple[Any, ...] | None = None
    sizes: tuple[int, ...] | None = None
    label: str = ""
    role: str = ""
    identity: Hashable = None
    is_plain: bool = False
    problem: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class AxisSizes:
    """The template of a node that keeps names with their lengths, and what lengths it has.

    Attributes:
        names: The names.
        fixed: Of a statistic, the lengths of its parameter, which are part of what it is.
        sizes: The lengths. Inside ``jax.shard_map`` an array has local ones and is the same array.
    """

    names: tuple[Any, ...]
    fixed: tuple[int, ...] | None
    sizes: tuple[int, ...] = dataclasses.field(compare=False, repr=False)

    def of(self, data: Any) -> tuple[int, ...]:
        """The lengths that the names have in other data, whose last dimensions they are."""
        shape: Any = getattr(data, "shape", None)
        if self.fixed is not None or shape is None or len(shape) < len(self.sizes):
            return self.sizes
        return tuple(shape[len(shape) - len(self.sizes) :])


class Reader(Protocol):
    """Opens and closes the nodes of one library.

    A reader may have further methods, which the library's own readers show: ``is_live(node)`` and
    ``thaw(node)`` for variables, ``set_names(node, names)`` for those that keep names themselves,
    ``why_not(tree)`` for what people give in place of a tree of arrays, ``initializing()`` for the
    context in which a model is built whose arrays a plan lays out.
    """

    library: str

    def reads(self, kind: type) -> bool:
        """Whether nodes of a type are this reader's; asked once for each type."""

    def open(self, node: Any) -> Content:
        """What a node holds; never raises, but gives a ``problem``."""

    def close(self, template: Any, data: Any) -> Any:
        """A node from its template and data: arrays, structs, tracers, shardings, anything."""


_registered: list[Reader] = []


def register_reader(reader: Reader) -> None:
    """Adds a reader for arrays of another library, or of your own.

    Its arrays are then planned, placed, initialised, trained and saved as all others are. A reader
    that is registered later goes before earlier ones, and before those of this package.

    Args:
        reader: An object with ``library``, ``reads``, ``open`` and ``close``; see ``Reader``.

    Raises:
        RuleTypeError: It has not these four.

    >>> import dataclasses, jax
    >>> import penzai_shard as pzs
    >>> from penzai_shard.readers import Content
    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass
    ... class Field:
    ...     values: jax.Array
    ...     dims: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    >>> class FieldReader:
    ...     library = __name__
    ...     field = Field
    ...     def reads(self, kind):
    ...         return kind is self.field
    ...     def open(self, node):
    ...         return Content(node.values, template=node.dims, names=node.dims)
    ...     def close(self, template, data):
    ...         return self.field(data, template)
    >>> register_reader(FieldReader())
    >>> mesh = pzs.make_mesh({"data": 8})
    >>> field = Field(jax.numpy.ones((8, 2)), ("time", "x"))
    >>> pzs.name_to_name_sharding(field, mesh, {"time": "data"}).values.spec
    P('data',)
    """
    needs = ("library", "reads", "open", "close")
    if isinstance(reader, type) or not all(hasattr(reader, name) for name in needs):
        fix = f"Give an object with {', '.join(needs)}."
        raise RuleTypeError("register_reader:", [Problem("", f"{reader!r} is no reader", fix)])
    _registered.insert(0, reader)
    _read_type.cache_clear()


def reader_of(kind: type) -> Reader | None:
    """The reader of the nodes of a type, or None."""
    return None if kind.__module__ in _PLAIN_MODULES else _read_type(kind, len(sys.modules))[0]


def is_node(value: Any) -> bool:
    """Whether a reader opens this value."""
    return reader_of(type(value)) is not None


def is_module(kind: type) -> bool:
    """Whether Python numbers in nodes of a type are settings of a module, and no arrays."""
    return kind.__module__ not in _PLAIN_MODULES and _read_type(kind, len(sys.modules))[1]


def _active() -> list[Reader]:
    imported = [name for library, name in _OURS.items() if library in sys.modules]
    modules = [importlib.import_module(name) for name in imported]
    readers = [*_registered, *(reader for module in modules for reader in module.READERS)]
    return [reader for reader in readers if reader.library in sys.modules]


# Asked of every node of every tree. The number of modules tells that there may be a new library.
@functools.lru_cache(maxsize=4096)
def _read_type(kind: type, modules: int) -> tuple[Reader | None, bool]:
    imported = [pair for pair in _MODULE_TYPES.items() if pair[0] in sys.modules]
    known = tuple(getattr(sys.modules[library], name) for library, name in imported)
    reader = next((reader for reader in _active() if reader.reads(kind)), None)
    return reader, issubclass(kind, known)


def find_refusal(tree: Any) -> tuple[str, str] | None:
    """Why something is no tree of arrays though people give it for one, and what to give."""
    asked = (reader for reader in _active() if hasattr(reader, "why_not"))
    return next((found for reader in asked if (found := reader.why_not(tree))), None)


def initializing_contexts() -> list[contextlib.AbstractContextManager[Any]]:
    """The contexts in which libraries build models and leave their arrays where they are."""
    asked = (reader for reader in _active() if hasattr(reader, "initializing"))
    return [reader.initializing() for reader in asked]
