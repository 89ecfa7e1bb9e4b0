"""Taking off a model what was put into it."""

from collections.abc import Iterable
from typing import Any

from penzai_shard.errors import RuleTypeError
from penzai_shard.surgery.inserted_layers import Inserted, Original, library_role, original_in
from penzai_shard.surgery.places import Finder
from penzai_shard.surgery.references import display_name
from penzai_shard.surgery.refusals import EditRefused
from penzai_shard.surgery.rewriting import Rewriter
from penzai_shard.surgery.tree_nodes import Keys


class _Stripping:
    """Which nodes of one model come off, and what is left of each, from the inside out.

    Args:
        layers: The types to take off; None for everything that was put in.
    """

    def __init__(self, layers: tuple[type, ...] | None) -> None:
        self._layers = layers
        # Of this library's layers the very type counts, of all others subclasses too.
        self._others = tuple(kind for kind in layers or () if library_role(kind) is None)
        # The originals that nothing was found around so far, by id.
        self._left: dict[int, Original] = {}

    def run(self, model: Any) -> Any:
        self._rewriter = Rewriter(
            Finder(self._is_suspect, lambda node, keys, state: False),
            self._rest,
            enters=lambda node: not self._comes_off_whole(node),
        )
        stripped = self._rewriter.run(model)
        if self._left and self._layers is None:
            # Someone took these out of the layers around them.
            stripped = Rewriter(
                Finder(lambda kind, _: kind is Original, lambda node, keys, state: False),
                lambda node, keys: (node.body,),
                enters=lambda node: True,
            ).run(stripped)
        return stripped

    def _is_suspect(self, node_type: type, is_layer: bool) -> bool:
        return library_role(node_type) is not None or issubclass(node_type, self._others)

    def _is_wanted(self, node: Any) -> bool:
        layers = self._layers
        return layers is None or type(node) in layers or isinstance(node, self._others)

    def _comes_off_whole(self, node: Any) -> bool:
        return (
            type(node) is Inserted
            and not node.holds_original
            and (self._is_wanted(node) or self._is_wanted(node.body))
        )

    def _rest(self, node: Any, keys: Keys) -> tuple[Any, ...]:
        """What is left of a node in whose inside nothing is left to be taken off."""
        match library_role(type(node)):
            case "original":
                self._left[id(node)] = node
                return (node,)
            case "inserted":
                return () if self._comes_off_whole(node) else self._rest_of_inserted(node, keys)
            case "sequence":
                return (node,) if len(node.sublayers) > 1 else tuple(node.sublayers)
            case _ if not self._is_wanted(node):
                return (node,)
            case "wrapper":
                return self._one(node.body)
            case "passer":
                return ()
            case "rolled":
                return (node.to_layer_stack(),)
        # A type of somebody else's that was named.
        original = original_in(node)
        if original is not None:
            return (original,)
        if hasattr(node, "body"):
            return self._one(node.body)
        if not keys:
            raise EditRefused(keys, f"nothing would be left of this {type(node).__name__}.")
        return ()

    def _rest_of_inserted(self, node: Inserted, keys: Keys) -> tuple[Any, ...]:
        original = original_in(node.body) if node.holds_original else None
        if original is not None and (self._is_wanted(node) or node.body is original):
            self._left.pop(id(original), None)
            return self._one(original.body)
        if node.holds_original and self._is_wanted(node):
            name = type(node.body).__name__
            raise EditRefused(
                keys,
                f"a recipe put {name} around a layer, and that layer is not in it any more: its "
                "Original(...) was replaced or taken out. Put penzai_shard.surgery.Original(layer) "
                "around what belongs in its place.",
            )
        return (node,)

    def _one(self, body: Any) -> tuple[Any, ...]:
        return () if body is self._rewriter.removed else (body,)


def read_layer_types(layers: Any) -> tuple[type, ...] | None:
    """The types of ``strip``'s argument, in whatever form they were given."""
    if layers is None:
        return None
    given = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else (
        layers,
    )  # fmt: skip
    wrong = [layer for layer in given if not isinstance(layer, type)]
    if wrong:
        given_text = isinstance(wrong[0], str)
        example = f"the class {wrong[0]}" if given_text else display_name(type(wrong[0]))
        raise RuleTypeError(
            f"strip takes layer types, not {wrong[0]!r}. "
            f"Write {example}, or leave layers out to take off everything."
        )
    return given


def strip(model: Any, layers: Any = None) -> Any:
    """Takes off what was put into a model, and gives the original back.

    Wrapper layers leave their body, constraint layers vanish from the lists they are in, a layer
    that a recipe had to put into a sequence of its own comes back to its place, and a rolled layer
    stack becomes Penzai's. Parts that nothing was put into are the same objects, and so are all
    parameters, with whatever values they have now. A model without anything to take off comes
    back as it is.

    All is known by its type, also after training, placing, pickling or ``jax.tree.map``. Layers of
    this library come off whoever put them in; classes that somebody else derived from them are
    somebody else's. Layers of somebody else's come off if a recipe put them in, and thereby into
    an ``Inserted``. What ``replace`` put in stays, apart from ``RolledLayerStack``.

    Args:
        model: The model; it stays as it is.
        layers: A layer type, or several, to take off no others. Of this library's types the very
            type counts, of all others subclasses too. Of types of somebody else's, those that a
            recipe put around a layer, or with a field ``body``, leave that, and all others vanish.

    Returns:
        The model without them.

    Raises:
        RuleTypeError: ``layers`` holds something that is not a type; or what a recipe had put a
            layer around was taken out by hand.

    >>> from penzai import pz
    >>> from penzai_shard.layers import Checkpointed, Jitted
    >>> layer = pz.nn.Identity()
    >>> strip(Jitted(Checkpointed(layer))) is layer
    True
    >>> strip(Jitted(Checkpointed(layer)), layers=Jitted)
    Checkpointed(body=Identity(), policy=None)
    """
    return _Stripping(read_layer_types(layers)).run(model)
