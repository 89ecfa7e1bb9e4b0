"""What the models are made of: structs, weights with names, attention, and steps of functions."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from penzai_shard.choosing.choices.asked_problem import AskedProblem, read_problem

ADAMW = optax.adamw(1e-3)


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def tokens_struct(batch: int, seq: int) -> jax.ShapeDtypeStruct:
    return struct(batch, seq, dtype=jnp.int32)


def weights_structs(
    names: Mapping[str, tuple[str, ...]], lengths: Mapping[str, int]
) -> dict[str, Any]:
    return {
        path: struct(*(math.prod(lengths[each] for each in name.split("*")) for name in axes))
        for path, axes in names.items()
    }


def plain_problem(
    weights: Any,
    apply: Callable[..., Any],
    inputs: Mapping[str, Any],
    plain_arrays: bool = True,
    optimizer: optax.GradientTransformation = ADAMW,
) -> AskedProblem:
    """The last of some inputs are the tokens that the logits of a function are to predict."""

    def loss(*, model: Any, **given: Any) -> Any:
        wanted = given[list(inputs)[-1]]
        return optax.softmax_cross_entropy_with_integer_labels(apply(model, **given), wanted).mean()

    return problem_of_loss(weights, loss, inputs, plain_arrays, optimizer)


def problem_of_loss(
    weights: Any,
    loss: Callable[..., Any],
    inputs: Mapping[str, Any],
    plain_arrays: bool = True,
    optimizer: optax.GradientTransformation = ADAMW,
) -> AskedProblem:
    """A step of a loss that takes the weights as ``model``, and the inputs."""

    def loss_fn(*, model: Any, rng: Any, state: Any, **given: Any) -> tuple[Any, Any, Any]:
        del rng
        return loss(model=model, **given), state, {}

    called: Any = loss_fn
    return read_problem(weights, called, optimizer, dict(inputs), None, plain_arrays)


def normed(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attended(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    """Attention of [batch, seq, heads, projection]."""
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1), v)
