"""What the wrapper layers share: how they are called, and the wrapped layer's attributes."""

from typing import Any

from penzai import pz

from penzai_shard.layers.unfit_calls import UNFIT_CALL, explain_unfit_call
from penzai_shard.meshes import auto_context


class WrapperLayer(pz.nn.Layer):
    """Base class of layers that hold another in ``body`` and run it in another way.

    Public attributes that the wrapper does not have itself are those of ``body``, so that code
    written for the bare layer, such as Penzai's samplers, can read a wrapped one. The wrapper's
    own fields and methods come first; private names and the protocols of JAX and treescope are
    the wrapper's own. Reading only: ``dataclasses.replace`` takes the wrapper's fields, and
    a method found in the body runs on the body, without the wrapper.

    A class that derives from this one is decorated with ``pz.pytree_dataclass`` and declares
    ``body`` among its fields. It says how the layer runs in ``_run``, or in a ``__call__`` of its
    own.

    Attributes:
        body: The layer.

    >>> from penzai_shard.layers import Scoped
    >>> Scoped(pz.nn.ConstantRescale(by=2.0), "scale").by
    2.0
    """

    body: Any

    def __call__(self, argument: Any, /, **side_inputs: Any) -> Any:
        """Runs the layer in the wrapper's way.

        Args:
            argument: The layer's input.
            **side_inputs: The layer's side inputs.

        Returns:
            The layer's output.

        Raises:
            RuleTypeError: A parameter or an input is abstract, or was donated.
            MeshError: Not all arrays are on the same devices.
        """
        try:
            with auto_context():
                return self._run(argument, side_inputs)
        except UNFIT_CALL as error:
            explain_unfit_call(error, self, argument, side_inputs)
            raise

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        """What ``__call__`` does where operations on an Auto mesh are allowed."""
        return self.body(argument, **side_inputs)

    def __getattr__(self, name: str) -> Any:
        """The body's attribute of that name; called only for names the wrapper does not have.

        Args:
            name: The name.

        Returns:
            The attribute.

        Raises:
            AttributeError: Neither the wrapper nor what it wraps has it.
        """
        # From the dictionary, as a copy that is being built has no body yet. Names that start with
        # an underscore (__jax_array__, _repr_html_) ask an object what it is itself.
        fields = self.__dict__
        if name.startswith("_") or "body" not in fields:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        body = fields["body"]
        try:
            return getattr(body, name)
        except AttributeError as error:
            if error.obj is not body:
                raise  # A property of the body failed; its own message says why.
            wrapped = " around ".join(type(layer).__name__ for layer in _nested(self))
            raise AttributeError(
                f"neither {type(self).__name__!r} nor what it wraps has an attribute {name!r}: "
                f"{wrapped}",
                name=name,
                obj=self,
            ) from None

    def __dir__(self) -> list[str]:
        """The wrapper's own names and the body's public ones."""
        body = self.__dict__.get("body")
        return sorted({*super().__dir__(), *(name for name in dir(body) if name[0] != "_")})


def _nested(layer: Any) -> list[Any]:
    """A wrapper, the wrappers inside it, and the layer that they wrap."""
    found = [layer]
    while isinstance(layer, WrapperLayer) and "body" in layer.__dict__:
        layer = layer.__dict__["body"]
        found.append(layer)
    return found
