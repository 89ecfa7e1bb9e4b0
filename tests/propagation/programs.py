"""Programs with a ``shard_map`` in them, lowered for a mesh without devices.

``SHARD_MAPS`` has functions of two arrays by name, ``lower_shard_map`` lowers one of them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS, COLUMNS, BOTH, WHOLE = P("data"), P(None, "model"), P("data", "model"), P()


def array(*spec, shape=(16, 16), dtype=jnp.float32):
    """An argument with a layout; see ``undecided`` for one without."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*spec)))


def undecided(shape=(16, 16), dtype=jnp.float32):
    """An argument whose layout is what is propagated to it."""
    return jax.ShapeDtypeStruct(shape, dtype)


def pinned(x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def manual(function, into=ROWS, out=ROWS, axes=("data", "model")):
    return jax.shard_map(
        function, mesh=MESH, in_specs=into, out_specs=out, axis_names={*axes}, check_vma=False
    )


def lower(function, *arguments, **options):
    return jax.jit(function, **options).trace(*arguments).lower(lowering_platforms=("cpu",))


SINE = manual(jnp.sin)
TOTAL = manual(lambda x: lax.psum(x.sum(0), "data"), ROWS, WHOLE)
# One mesh axis is manual, the other one is left to the compiler.
PARTLY = manual(jnp.sin, axes=("data",))
PRODUCT = manual(lambda x, w: lax.psum(x @ w, "model"), (BOTH, P("model")), ROWS)
GATHERED = manual(lambda x: lax.all_gather(x, "data", tiled=True), ROWS, WHOLE)
# Without a mesh of its own, it is that of what is around it.
INNER = jax.shard_map(jnp.sin, in_specs=COLUMNS, out_specs=COLUMNS, axis_names={"model"})
NESTED = manual(INNER, axes=("data",))
CALLED = jax.jit(SINE)


def scan(turn, x, xs=None, length=3):
    return lax.scan(turn, x, xs, length=length)[0]


def turns(body, x):
    return lax.fori_loop(0, 3, lambda _, c: body(c), x)


SHARD_MAPS = {
    "alone": lambda x, w: SINE(x),
    "of what is computed": lambda x, w: SINE(x @ w) @ w,
    "of a constraint": lambda x, w: SINE(pinned(x, "data", "model")) @ w,
    "two results": lambda x, w: manual(lambda a, b: (a @ b, b), (ROWS, WHOLE), (ROWS, WHOLE))(x, w),
    "a sum": lambda x, w: TOTAL(x) + w,
    "a product": lambda x, w: PRODUCT(x, w),
    "gathered": lambda x, w: GATHERED(x) @ w,
    "partly manual": lambda x, w: PARTLY(x @ w),
    "one behind another": lambda x, w: PARTLY(SINE(x) @ w),
    "one result for two": lambda x, w: SINE(x) @ w + SINE(x),
    "called": lambda x, w: CALLED(x) @ w,
    "called twice": lambda x, w: CALLED(CALLED(x) @ w),
    "called in a call": lambda x, w: jax.jit(lambda y: CALLED(y @ w))(x),
    "nested": lambda x, w: NESTED(x @ w),
    "nested in a call": lambda x, w: jax.jit(NESTED)(x) @ w,
    "loop": lambda x, w: turns(SINE, x),
    "loop, product": lambda x, w: turns(lambda c: SINE(c @ w), x),
    "loop, partly": lambda x, w: turns(lambda c: PARTLY(c) @ w, x),
    "loop, called": lambda x, w: turns(CALLED, pinned(x, "data")),
    "scan": lambda x, w: scan(lambda c, _: (SINE(c), None), x),
    "scan, split carry": lambda x, w: scan(
        lambda c, _: (PRODUCT(c, w), None), pinned(x, "data", "model")
    ),
    "scan over stack": lambda x, w: scan(lambda c, u: (SINE(c) + u, None), x, jnp.stack([w, w, w])),
    "scan in a shard_map": lambda x, w: manual(lambda y: scan(lambda c, _: (c + y, c), y))(x),
    "while": lambda x, w: lax.while_loop(lambda c: c.sum() < 3, SINE, x),
    "branches": lambda x, w: lax.cond(x[0, 0] > 0, SINE, lambda y: y @ w, x),
    "both branches": lambda x, w: lax.cond(x[0, 0] > 0, SINE, PARTLY, x),
    "branch in a loop": lambda x, w: turns(
        lambda c: lax.cond(c[0, 0] > 0, SINE, lambda y: y, c), x
    ),
    "grad": lambda x, w: jax.grad(lambda w: SINE(x @ w).sum())(w),
    "remat": lambda x, w: jax.grad(lambda w: jax.checkpoint(lambda w: SINE(x @ w).sum())(w))(w),
    "grad of scan, remat": lambda x, w: jax.grad(
        lambda w: scan(jax.checkpoint(lambda c, _: (SINE(c @ w), None)), x).sum()
    )(w),
}


def lower_shard_map(name):
    """A program of ``SHARD_MAPS``: rows of its arrays are split."""
    return lower(SHARD_MAPS[name], array("data"), array("data"))
