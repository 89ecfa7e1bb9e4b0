"""A loss function for models of each library, with the input that it takes."""

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz

from tests.models import EMBED, EquinoxBlock, LinenBlock, hax

KEY = jax.random.key(0)
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
TOKENS = np.arange(32).reshape(8, 4) % 16


def mean_square(array):
    return jnp.mean((array - 1) ** 2)


def llama_loss(model, rng, state, x):
    logits = model(pz.nx.wrap(x, "batch", "seq"))
    return mean_square(logits.unwrap("batch", "seq", "vocabulary")), state, {}


def mlp_loss(model, rng, state, x):
    out = model(pz.nx.wrap(x, "batch", "features"))
    return mean_square(out.unwrap("batch", "features")), state, {}


def linen_loss(model, rng, state, x):
    loss = mean_square(LinenBlock().apply(model, x))
    model["batch_stats"] = jax.tree.map(lambda mean: mean + 1, model["batch_stats"])
    return loss, state, {}


def nnx_loss(model, rng, state, x):
    return mean_square(model(x * jnp.arange(1.0, 9)[:, None])), state, {}


def haliax_loss(model, rng, state, x):
    out = model(hax.named(x, ("batch", EMBED.name)))
    return hax.mean((out - 1) ** 2).scalar(), state, {}


def equinox_loss(model, rng, state, x):
    assert isinstance(model, EquinoxBlock)
    keys = jax.random.split(rng, len(x))
    out = jax.vmap(lambda x, key: model.mlp(model.dropout(x, key=key)))(x, keys)
    return mean_square(out), state, {}


def plain_loss(model, rng, state, x):
    return model["rate"] * mean_square(model["act"](x[:, :4] @ model["w"])), state, {}


LOSSES = {
    "llama": (llama_loss, TOKENS),
    "counted mlp": (mlp_loss, X),
    "v1 mlp": (mlp_loss, X),
    "linen": (linen_loss, X),
    "nnx": (nnx_loss, X),
    "haliax mlp": (haliax_loss, X),
    "equinox": (equinox_loss, X),
    "plain": (plain_loss, X),
}
