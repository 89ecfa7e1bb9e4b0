"""The dtype that a caller asks for all floating numbers."""

from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.errors import RuleTypeError


def floating_dtype(dtype: Any) -> Any:
    """A dtype for floating numbers, as the caller gave it.

    Raises:
        RuleTypeError: It is none.
    """
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise RuleTypeError(
            f"dtype={dtype!r}: give a dtype of floating numbers, such as 'bfloat16'; integers keep "
            "theirs."
        )
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise RuleTypeError(
            f"dtype={dtype!r}: JAX makes {jax.dtypes.canonicalize_dtype(found)} of it. Give that, "
            "or set jax.config.update('jax_enable_x64', True)."
        )
    return found
