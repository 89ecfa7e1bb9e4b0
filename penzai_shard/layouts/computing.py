"""Models that constrain their own activations by name, computing in a layout.

Models of Penzai are edited: layers that constrain are put in. Those of some other libraries have
such constraints in their code, which wait for rules and a mesh to be in force.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from penzai_shard.axis_rules import AxisRules
from penzai_shard.library_apis.jax_api import manual_mesh_axes
from penzai_shard.meshes import AnyMesh, auto_twin
from penzai_shard.readers import loaded_readers
from penzai_shard.training import refuse_uneven


def computing_by(
    loss_fn: Callable[..., Any], mesh: AnyMesh, rules_for: Callable[[Any], AxisRules]
) -> Callable[..., Any]:
    """A loss function in which the constraints that a model has in itself are in force.

    Args:
        loss_fn: A loss function, as ``build_train_step_fn`` takes it.
        mesh: The mesh.
        rules_for: Gives the rules for activations, for a model.

    Returns:
        A loss function of the same signature.
    """

    @functools.wraps(loss_fn)
    def computing(*args: Any, model: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for reader in loaded_readers():
                if reader.constrains(model):
                    model = stack.enter_context(
                        reader.computing(model, auto_twin(mesh), rules_for(model))
                    )
            return loss_fn(*args, model=model, **kwargs)

    return computing


def refusing_uneven_batches(
    loss_fn: Callable[..., Any], mesh: AnyMesh, batch_rules: AxisRules
) -> Callable[..., Any]:
    """A loss function that refuses named inputs whose batch does not divide over the mesh.

    In a layout in which other lengths need not divide, nothing else would.

    Args:
        loss_fn: A loss function, as ``build_train_step_fn`` takes it.
        mesh: The mesh.
        batch_rules: The rules for the logical axes of the batch.

    Returns:
        A loss function of the same signature.
    """

    @functools.wraps(loss_fn)
    def checked(*args: Any, model: Any, rng: Any, state: Any, **inputs: Any) -> Any:
        # In a manual region inputs are one device's part of the batch.
        if not manual_mesh_axes():
            refuse_uneven(inputs, mesh, batch_rules)
        return loss_fn(*args, model=model, rng=rng, state=state, **inputs)

    return checked
