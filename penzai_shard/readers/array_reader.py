"""What a reader of another library's arrays is."""

import abc
import contextlib
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError
from penzai_shard.meshes import AnyMesh
from penzai_shard.rule_kinds import LogicalAxis, dimension_texts

Role = Literal["parameter", "state"]


@dataclasses.dataclass(frozen=True)
class ReadArray:
    """What a node of another library holds.

    Attributes:
        data: The array, or what stands in its place: a struct, a sharding, None.
        names: The logical axis of each of its dimensions, None for a positional one. Dimensions
            beyond the last name are positional. None altogether if the library gives no names.
        problem: Why names that are there cannot be used; empty when they can. Such an array is
            refused, whatever the options.
        sizes: The length of each named dimension, if the node knows that without its data; then
            every name has one, and none is None. Where the data has other lengths it is taken for
            an optimizer's statistic.
        note: What the array is, where that explains its names; empty otherwise.
        mesh: The mesh on which the library itself lays the array out when it is used, if the node
            says so; a layout on another one is refused.
        rules: The rules by which it does, if the node has rules of its own; a layout that they do
            not give is refused.
        rules_for_some: Whether these rules are only for the names that they have, so that other
            names may go anywhere.
    """

    data: Any
    names: tuple[LogicalAxis | None, ...] | None
    problem: str = ""
    sizes: tuple[int, ...] | None = None
    note: str = ""
    mesh: Any = None
    rules: Any = None
    rules_for_some: bool = False

    def fitted(self) -> "ReadArray":
        """The same with one name, or None, for each dimension of the array.

        Names that cannot be used are left out, and ``problem`` says why.

        >>> ReadArray(np.ones((2, 3)), ("embed",)).fitted().names
        ('embed', None)
        """
        if self.names is None:
            return self
        problem = self.problem
        rank = 0 if problem else np.ndim(self.data)
        given = [name for name in self.names if name is not None]
        if not problem and len(self.names) > rank:
            problem = (
                f"it has {len(self.names)} axis names, {self.names}, and rank {rank}. Give one for "
                "each dimension; what an optimizer keeps of some dimensions of a parameter is laid "
                "out together with it, in one tree that has the parameters in a field params"
            )
        elif not problem and len(set(given)) < len(given):
            problem = f"its axis names {self.names} have one twice. Give each dimension its own"
        elif not problem and self.sizes not in (None, shape := np.shape(self.data)):
            axes = ", ".join(dimension_texts(self.names, self.sizes or ()))
            problem = f"its logical axes ({axes}) do not fit its data of shape {shape}"
        names = () if problem else self.names
        return dataclasses.replace(
            self, names=(*names, *(None,) * (rank - len(names))), problem=problem
        )


class ArrayReader(abc.ABC):
    """Reads the nodes that another library puts around its arrays, and makes others like them.

    A node is anything that holds one array: a box, a variable, an array type of its own. It is a
    pytree of JAX's, unless it is bare.

    Every reader has ``library``, ``reads``, ``read`` and ``with_data``; with these four, arrays are
    planned, placed, trained and stored by their names. Whatever else there is, a reader gives only
    if its library has

    - nodes that know the sizes of their data: ``resized``;
    - nodes that say whether they are parameters: ``role``;
    - a way of its own to name a node: ``naming``, and ``takes_names`` and ``named`` if a node may
      have no names at first;
    - arrays that nothing is put around: ``bare``, and ``memory`` to find those that are tied;
    - objects that are one wherever they occur: ``shares``, and ``shares_type`` and ``not_a_tree``
      for modules;
    - modules that hold no arrays, which are in dictionaries beside them: ``initializer_of``,
      ``collections`` and ``naming_in``;
    - something that is likely to be given in place of a tree of arrays: ``refusal``;
    - a way of its own to lay arrays out, where they are made: ``initializing``; and where they are
      used: ``constrains`` and ``computing``.

    Attributes:
        library: The module that defines the types of the nodes. The reader is loaded, and asked,
            only if this module was imported already.
        naming: What a user writes to give the array of a node names; for messages.
        takes_names: Whether a node may have no names, and can be given some.
        bare: Whether nodes are arrays themselves, with nothing around them that would be kept, so
            that their data stands in their place once something is done with them.
        shares: Whether a node that occurs twice in a tree is one array, as a mutable variable is.
            Otherwise nodes are plain values.

    >>> class LabelledReader(ArrayReader):
    ...     library = "labelled"
    ...
    ...     def reads(self, node_type):
    ...         return node_type.__name__ == "Array"
    ...
    ...     def read(self, node):
    ...         return ReadArray(node.values, node.labels)
    ...
    ...     def with_data(self, node, data):
    ...         return type(node)(data, node.labels)
    >>> LabelledReader().role(None) is None
    True
    """

    library: str
    naming: str = "Name it with pz.nx.wrap(array).tag(...)"
    takes_names: bool = False
    bare: bool = False
    shares: bool = False

    @abc.abstractmethod
    def reads(self, node_type: type) -> bool:
        """Whether nodes of a type are this reader's. Asked once for each type."""

    @abc.abstractmethod
    def read(self, node: Any) -> ReadArray:
        """What a node holds."""

    @abc.abstractmethod
    def with_data(self, node: Any, data: Any) -> Any:
        """A node like another, with other data, which may be of any type; nothing is checked."""

    def occurs_in(self, tree: Any) -> bool:
        """Whether a tree has nodes of this reader's. It is the same for all readers."""
        nodes = jax.tree_util.tree_leaves(tree, is_leaf=lambda node: self.reads(type(node)))
        return any(self.reads(type(node)) for node in nodes)

    def resized(self, node: Any, shape: Sequence[int], data: Any) -> Any:
        """A node like another, with data of the same rank and other lengths.

        Nodes that know their sizes need a method of their own.
        """
        return self.with_data(node, data)

    def role(self, node: Any) -> Role | None:
        """Whether a node is a parameter or a state variable, if the library says so."""
        return None

    def named(self, node: Any, names: Sequence[LogicalAxis | None]) -> Any:
        """A node like one that has no names, with these; asked only if ``takes_names``.

        Raises:
            RuleTypeError: The reader says ``takes_names`` and has no such method.
        """
        raise RuleTypeError(
            f"{type(self).__module__}.{type(self).__qualname__} says takes_names = True and has no "
            "method named(node, names). Give it one, or leave takes_names out."
        )

    def memory(self, node: Any) -> Hashable | None:
        """Equal for two nodes whose data is one and the same; None if that cannot be said."""
        return None

    def shares_type(self, node_type: type) -> bool:
        """Whether objects of a type, which hold nodes, are one object wherever they occur.

        Modules of some libraries are. Asked once for each type.
        """
        return False

    def not_a_tree(self, node: Any) -> str:
        """Why a shared object that JAX takes for a leaf is none of the arrays of a tree."""
        return f"this {type(node).__name__} is not a tree of arrays for JAX"

    def collections(self, model: Any) -> Mapping[str, str] | None:
        """Of a dictionary of collections of variables by name, what each of them holds.

        Returns:
            ``"parameter"`` or ``"state"`` for each collection, or why it can be neither; None for
            anything else than such a dictionary.
        """
        return None

    def initializer_of(self, node: Any) -> str:
        """How a user writes the method that makes the arrays of an object that holds none.

        Empty for anything else than such an object, or a class of them, of this library.
        """
        return ""

    def naming_in(self, tree: Any) -> str:
        """What a user writes to name the arrays of a tree that nothing is put around.

        Empty if the tree is not of this library.
        """
        return ""

    def refusal(self, tree: Any, as_model: bool = False) -> str:
        """Why something of the library cannot be used as a tree of arrays; empty if it can.

        Args:
            tree: What was given. It ends the sentence "takes a model or another tree of arrays".
            as_model: Whether its arrays are to be parameters by name.
        """
        return ""

    def initializing(self) -> contextlib.AbstractContextManager[Any]:
        """What is in force while an initialiser is traced to be run part by part.

        For libraries that put arrays on devices when they are made.
        """
        return contextlib.nullcontext()

    def lost_arrays(self, built: Any) -> list[str]:
        """What an initialiser has built, while it was traced, beside the arrays of its tree.

        Returns:
            For each array that JAX does not see in it, where it is and what to write instead.
        """
        return []

    def constrains(self, model: Any) -> bool:
        """Whether a model may constrain its activations itself, by logical axes."""
        return False

    def computing(
        self, model: Any, mesh: AnyMesh, rules: AxisRules
    ) -> contextlib.AbstractContextManager[Any]:
        """What is in force while a loss is computed with such a model; gives the model to use.

        Args:
            model: The model, with values in it.
            mesh: The mesh, its axes Auto.
            rules: The rules for activations.

        Raises:
            RuleTypeError: The library cannot follow the rules.
        """
        return contextlib.nullcontext(model)
