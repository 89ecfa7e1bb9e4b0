"""A small model of Haliax as its users write them."""

import warnings

import jax
import pytest

try:
    with warnings.catch_warnings():
        # Haliax imports what JAX has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        import equinox as eqx
        import haliax as hax
        import haliax.nn as hnn
        import haliax.partitioning
except (ImportError, AttributeError) as error:
    pytest.skip(
        f"this release of Haliax does not import on jax {jax.__version__}: {error!r}",
        allow_module_level=True,
    )

EMBED, MLP, LAYERS, BATCH = hax.make_axes(embed=8, mlp=16, layers=2, batch=8)
RULES = {"batch": "data", "mlp": "model"}


class Block(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        up, down = jax.random.split(key)
        return Block(hnn.Linear.init(EMBED, MLP, key=up), hnn.Linear.init(MLP, EMBED, key=down))

    def __call__(self, x):
        return x + self.down(hnn.relu(self.up(x)))


class Model(eqx.Module):
    blocks: hnn.Stacked
    norm: hnn.LayerNorm

    @staticmethod
    def init(key):
        blocks = hnn.Stacked.init(LAYERS, Block)(key=jax.random.split(key, LAYERS.size))
        return Model(blocks, hnn.LayerNorm.init(EMBED))

    def __call__(self, x):
        return self.norm(self.blocks.fold(x))


def skip_without_dot_products():
    """Skips a test of a model that computes, where this release of Haliax cannot on this JAX."""
    try:
        hax.dot(hax.ones(EMBED), hax.ones(EMBED), axis=EMBED)
    except AttributeError as error:
        pytest.skip(f"Haliax's dot product fails on jax {jax.__version__}: {error}")
