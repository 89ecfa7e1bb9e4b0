"""Loss functions for models of each library with the input they take, and one named matrix.

The matrix, its loss and its batch are those of most tests: ``initial()``, ``loss_fn``, ``batch()``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests.models import EMBED, EquinoxBlock, LinenBlock, hax

KEY = jax.random.key(0)
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)[::-1]
TOKENS = np.arange(32).reshape(8, 4) % 16


def mean_square(array):
    return jnp.mean((array - 1) ** 2)


# A named matrix


def weights(sharding=None, **others):
    # A copy: on a CPU the arrays of JAX may share memory with those of NumPy.
    return {"w": pz.nx.wrap(jax.device_put(W.copy(), sharding), "in", "out"), **others}


def initial(model=None, optimizer=None, key=KEY, **options):
    model = weights() if model is None else model
    return pzs.TrainState.initial_state(model, optimizer or optax.adam(0.1), key, **options)


def layout(mesh, rules=None, **options):
    rules = {"in": "data"} if rules is None else rules
    return pzs.train_state_sharding(initial(**options), mesh, rules)


def batch(mesh=None):
    array = pz.nx.wrap(jnp.asarray(X), "batch", "in")
    return array if mesh is None else jax.device_put(array, NamedSharding(mesh, P("data")))


def loss_fn(model, rng, state, x):
    out = pz.nx.nmap(jnp.dot)(x.untag("in"), model["w"].untag("in")).unwrap("batch", "out")
    return mean_square(out) + 0 * jax.random.uniform(rng), state, {"out": out}


def count_programs(step):
    return sum(program._cache_size() for program in step.programs.values())


def paths_of(caught):
    return [problem.path for problem in caught.value.problems]


# Each library


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


@nnx.jit
def call_nnx(model, x):
    return nnx.remat(lambda model, x: model(x))(model, x)


def nnx_loss(model, rng, state, x):
    return mean_square(call_nnx(model, x * jnp.arange(1.0, 9)[:, None])), state, {}


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
