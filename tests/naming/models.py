"""Models whose weights have no names, each with the names that its author would write.

Different axes are equally long wherever they can be: heads and projection, neurons and vocabulary,
layers and batch. Who takes equal lengths for equal axes is wrong in every one of them.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

# Letters of the names, and the length of each axis.
AXES = {
    "B": ("batch", 2), "S": ("seq", 8), "E": ("embedding", 16), "N": ("neurons", 32),
    "V": ("vocabulary", 32), "H": ("heads", 4), "P": ("projection", 4), "G": ("head_groups", 2),
    "Q": ("query_heads", 2), "L": ("layers", 2), "X": ("experts", 4), "T": ("positions", 16),
    "R": ("rank", 4), "O": ("outputs", 10), "C": ("qkv", 3), "U": ("gate_up", 2),
}  # fmt: skip
SIZES = dict(AXES.values())
B, S, E, N, V, H, P, G, Q, L, X, T, R, O, C, U = SIZES.values()  # noqa: E741


@dataclasses.dataclass(frozen=True)
class Model:
    """A function, the structs of what it takes, and what the dimensions of weights are called.

    ``a*b`` is the name of a product; None is a dimension that its author does not name, such as
    the taps of a convolution.
    """

    function: Callable[..., Any]
    weights: Any
    inputs: tuple[Any, ...]
    input_names: tuple[tuple[str | None, ...], ...]
    names: Mapping[str, tuple[str | None, ...]]


def read_axes(text):
    """``"E H*P -"`` as names."""

    def name(word):
        return "*".join(AXES[part][0] if part in AXES else part for part in word.split("*"))

    return tuple(None if word == "-" else name(word) for word in text.split())


def read_names(text):
    """``"embed V E; #.up E N"``: names by path; a line with ``#`` is one for each layer."""
    lines = [
        line.strip().replace("#", str(i)).partition(" ")
        for line in text.split(";")
        for i in range(L if "#" in line else 1)
    ]
    return {path: read_axes(axes) for path, _, axes in lines}


def struct(axes, dtype="float32", **sizes):
    """An array with these axes, each as long as ``SIZES`` or ``sizes`` say, else 4."""
    lengths = []
    for axis in axes:
        length = 1
        for part in (axis or "taps").split("*"):
            length *= (SIZES | sizes).get(part, 4)
        lengths.append(length)
    return jax.ShapeDtypeStruct(tuple(lengths), dtype)


def make(text, function, inputs="i B S", **sizes):
    """A model of flat weights; inputs are ``"f B S E"`` for floats, ``"i B S"`` for integers."""
    names = read_names(text)
    given = [line.split(" ", 1) for line in inputs.split("; ")]
    axes = tuple(read_axes(each) for _, each in given)
    kinds = ["float32" if kind == "f" else "int32" for kind, _ in given]
    structs = tuple(struct(own, kind, **sizes) for own, kind in zip(axes, kinds, strict=True))
    weights = {path: struct(own, **sizes) for path, own in names.items()}
    return Model(function, weights, structs, axes, names)


def gradients(model):
    """The gradient program of a model; its weights are named from only that."""

    def loss(weights, *inputs):
        return (jnp.abs(model.function(weights, *inputs)) ** 2).mean()

    return dataclasses.replace(model, function=jax.grad(loss))


# Parts


def block_of(w, i):
    """The weights of one layer, by the rest of their paths."""
    own = {path.removeprefix(f"{i}."): w[path] for path in w if path.startswith(f"{i}.")}
    return types.SimpleNamespace(**own)


def blocks_of(w, before=""):
    return [block_of(w, f"{before}{i}") for i in range(L)]


def decoder(text, block, ends="embed V E; head V E", **sizes):
    """A residual stream of layers, with logits at its end."""

    def function(w, tokens):
        x = w["embed"][tokens]
        if "positions" in w:
            x = x + w["positions"][jnp.arange(S)]
        for own in blocks_of(w):
            x = block(own, x)
        return norm(x) @ w.get("head", w["embed"]).T

    return make(f"{ends}; {text}", function, **sizes)


def norm(x, scale=1.0):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotate(x, is_of_neighbours=False):
    """Rotary positions, halves or neighbours rotated; x is [..., seq, heads, projection]."""
    angles = jnp.outer(jnp.arange(x.shape[-3]), jnp.arange(1, 1 + x.shape[-1] // 2))[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if is_of_neighbours else jnp.split(x, 2, -1)
    a, b = a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)
    return (
        jnp.stack([a, b], -1).reshape(x.shape) if is_of_neighbours else jnp.concatenate([a, b], -1)
    )


def softmax(scores, causal=True):
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jax.nn.softmax(scores, -1)


def heads_of(x, heads=H):
    return x.reshape(*x.shape[:2], heads, -1)


def attend(q, k, v, causal=True, bias=0.0):
    """[batch, seq, heads, projection]; keys of fewer heads are repeated; heads side by side."""
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], 2) for y in (k, v))
    shares = softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias, causal)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(*q.shape[:2], -1)


def conv(x, kernel, stride=1, groups=1):
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip


QKVO = "#.q E H*P; #.k E H*P; #.v E H*P; #.o H*P E; "
MLP = "#.up E N; #.down N E"


def attention(w, x, context=None, **options):
    context = x if context is None else context
    q, k, v = (heads_of(y @ m) for y, m in ((x, w.q), (context, w.k), (context, w.v)))
    return attend(q, k, v, **options) @ w.o


def mlp(w, x):
    return x + jax.nn.gelu(x @ w.up) @ w.down


# Transformers of flat weights

LLAMA = (
    "#.norm E; #.q G*Q*P E; #.k G*P E; #.v G*P E; #.o E G*Q*P; "
    "#.norm2 E; #.gate N E; #.up N E; #.down E N"
)


def llama(attend=attend, turn=rotate, more="", change=None):
    """Weights are [out, in], as torch stores them."""

    def block(w, x):
        h = norm(x, w.norm)
        q, k, v = ((h @ m.T).reshape(B, S, -1, P) for m in (w.q, w.k, w.v))
        q = q if change is None else change(w, h, q)
        x = x + attend(turn(q), turn(k), v).reshape(x.shape) @ w.o.T
        h = norm(x, w.norm2)
        return x + (jax.nn.silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T

    return decoder(LLAMA + more, block)


def grouped(q, k, v):
    q = q.reshape(B, S, G, Q, P)
    shares = softmax(jnp.einsum("bsgqd,btgd->bgqst", q, k))
    return jnp.einsum("bgqst,btgd->bsgqd", shares, v)


def of_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def cached(q, k, v):
    """Keys and values are written into a longer cache."""
    k, v = (jax.lax.dynamic_update_slice(jnp.zeros((B, T, G, P)), y, (0, 0, 0, 0)) for y in (k, v))
    return attend(q, k, v, causal=False, bias=jnp.where(jnp.arange(T) < S, 0.0, -1e9))


def mapped(q, k, v):
    def of_head(q, k, v):
        return softmax(q @ k.T) @ v

    return jax.vmap(jax.vmap(of_head, 1, 1))(q, jnp.repeat(k, Q, 2), jnp.repeat(v, Q, 2))


def add_lora(w, h, q):
    return q + ((h @ w.a.T) @ w.b.T).reshape(q.shape)


def gpt2(has_heads_first=False):
    """Queries, keys and values from one weight, learned positions, tied vocabulary, biases."""
    joined = "H*C*P" if has_heads_first else "C*H*P"

    def block(w, x):
        h = norm(x, w.scale) + w.shift
        made = h @ w.qkv + w.bias
        if has_heads_first:
            q, k, v = jnp.split(heads_of(made), 3, -1)
        else:
            q, k, v = map(heads_of, jnp.split(made, 3, -1))
        x = x + attend(q, k, v) @ w.o
        return x + jax.nn.gelu(x @ w.up + w.up_bias) @ w.down + w.down_bias

    text = f"#.scale E; #.shift E; #.qkv E {joined}; #.bias {joined}; #.o H*P E; "
    return decoder(f"{text}{MLP}; #.up_bias N; #.down_bias E", block, "embed V E; positions T E")


def gemma():
    """One key and one value for all heads; gates; the vocabulary is tied."""

    def block(w, x):
        h = norm(x, 1 + w.norm)
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, m) for m in (w.q, w.k, w.v))
        x = x + attend(rotate(q), rotate(k), v) @ w.o.reshape(-1, E)
        return x + (jax.nn.gelu(x @ w.gate_up[0]) * (x @ w.gate_up[1])) @ w.down

    text = "#.norm E; #.q E Q P; #.k E - P; #.v E - P; #.o Q P E; #.gate_up U E N; #.down N E"
    return decoder(text, block, "embed V E", query_heads=H, taps=1)


def phi3():
    """Queries, keys and values of different lengths in one weight, gates and values in another."""

    def block(w, x):
        q, k, v = jnp.split(norm(x) @ w.qkv.T, [H * P, (H + G) * P], -1)
        x = x + attend(heads_of(q), heads_of(k, G), heads_of(v, G)) @ w.o.T
        gate, up = jnp.split(x @ w.gate_up.T, 2, -1)
        return x + (jax.nn.silu(gate) * up) @ w.down.T

    text = "#.qkv qkv_projection E; #.o E G*Q*P; #.gate_up U*N E; #.down E N"
    return decoder(text, block, qkv_projection=(H + 2 * G) * P)


def t5():
    """Encoder and decoder with attention across, and a bias by distance that layers share."""
    text = "; ".join(f"{QKVO}{MLP}".replace("#.", f"{part}.#.") for part in ("in", "out"))
    text += "; " + QKVO.replace("#.", "across.#.").removesuffix("; ")

    def function(w, sources, targets):
        bias = w["bias"][jnp.clip(jnp.arange(S)[:, None] - jnp.arange(S), 0, 7)].transpose(2, 0, 1)
        y, x = w["shared"][sources], w["shared"][targets]
        for own in blocks_of(w, "in."):
            y = mlp(own, y + attention(own, norm(y), causal=False, bias=bias))
        for own, across in zip(blocks_of(w, "out."), blocks_of(w, "across."), strict=True):
            x = x + attention(own, norm(x), bias=bias)
            x = mlp(own, x + attention(across, norm(x), y, causal=False))
        return x @ w["shared"].T

    names = f"shared V E; bias buckets H; {text}"
    return make(names, function, "i B S; i B targets", targets=S, buckets=8)


def bert():
    """Norms behind, three tables, a square pooler, whose outputs are an axis of its own."""

    def function(w, tokens, segments):
        x = w["words"][tokens] + w["positions"][jnp.arange(S)] + w["types"][segments]
        for own in blocks_of(w):
            x = norm(x + attention(own, x, causal=False), own.norm)
            x = norm(mlp(own, x), own.norm2)
        return jnp.tanh(x[:, 0] @ w["pooler"]) @ w["classes"]

    ends = "words V E; positions T E; types segments E; pooler E pooled; classes pooled labels"
    text = f"{ends}; #.norm E; #.norm2 E; {QKVO}{MLP}"
    return make(text, function, "i B S; i B S", pooled=E, labels=2, segments=2)


def vit():
    """Patches of 4 x 4 pixels by a convolution, a class token, learned positions."""

    def function(w, images):
        x = conv(images, w["patches"], 4).reshape(B, -1, E)
        x = jnp.concatenate([jnp.tile(w["token"], (B, 1, 1)), x], 1) + w["places"]
        for own in blocks_of(w):
            x = mlp(own, x + attention(own, norm(x), causal=False))
        return norm(x)[:, 0] @ w["head"]

    text = f"patches - - colours E; token - E; places T E; head E O; {QKVO}{MLP}"
    model = make(text, function, "f B pixels pixels colours", pixels=16, positions=17)
    return dataclasses.replace(
        model, weights=model.weights | {"token": struct(["one", "embedding"], one=1)}
    )


def scanned():
    """Layers along the first dimension of their weights, scanned and rematerialised."""
    text = "q L E H P; k L E H P; v L E H P; o L H P E; up L E N; down L N E; scale L E"

    def block(x, w):
        h = norm(x, w["scale"])
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[name]) for name in "qkv")
        x = x + attend(q, k, v) @ w["o"].reshape(-1, E)
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def function(w, tokens):
        layers = {path: w[path] for path in w if path not in ("embed", "head")}
        return jax.lax.scan(jax.checkpoint(block), w["embed"][tokens], layers)[0] @ w["head"]

    return make(f"embed V E; head E V; {text}", function)


# Mixtures of experts


def mixture(moe, text="#.router E X; #.up X E N; #.down X N E"):
    return decoder(QKVO + text, lambda w, x: moe(w, x + attention(w, norm(x))))


def all_experts(w, x):
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ w.router), 2)
    share = (jax.nn.one_hot(chosen, X) * gates[..., None]).sum(-2)
    hidden = jax.nn.silu(jnp.einsum("bse,xen->bsxn", x, w.up))
    return x + jnp.einsum("bsxn,xne,bsx->bse", hidden, w.down, share)


def dispatched(w, x):
    """Each token goes to one expert, with room for as many tokens as there are experts."""
    chances = jax.nn.softmax(x @ w.router)
    chosen = jax.nn.one_hot(jnp.argmax(chances, -1), X)
    place = (jnp.cumsum(chosen, 1) * chosen - 1).astype(int)
    sent = chosen[..., None] * jax.nn.one_hot(place, X)
    hidden = jax.nn.relu(jnp.einsum("bsxc,bse,xen->xbcn", sent, x, w.up))
    return x + jnp.einsum("xbcn,xne,bsxc,bsx->bse", hidden, w.down, sent, chances)


def sorted_by_expert(w, x):
    rows = x.reshape(-1, E)
    gates, chosen = jax.lax.top_k(rows @ w.router, 1)
    order = jnp.argsort(chosen[:, 0])
    counts = jnp.bincount(chosen[:, 0], length=X)
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows[order], w.up, counts))
    made = jax.lax.ragged_dot(hidden, w.down, counts)[jnp.argsort(order)]
    return x + (made * jax.nn.softmax(gates)).reshape(x.shape)


def experts_apart():
    """As Mixtral is stored: three weights for each expert."""
    experts = [f"#.{i}.{line}" for i in range(X) for line in ("up N E", "down E N")]

    def moe(w, x):
        gates, chosen = jax.lax.top_k(x @ w.router.T, 2)
        share = (jax.nn.one_hot(chosen, X) * jax.nn.softmax(gates)[..., None]).sum(-2)
        for i in range(X):
            up, down = vars(w)[f"{i}.up"], vars(w)[f"{i}.down"]
            x = x + share[..., i : i + 1] * (jax.nn.silu(x @ up.T) @ down.T)
        return x

    return mixture(moe, f"#.router X E; {'; '.join(experts)}")


# Libraries


def names_of_blocks(before, text, is_scanned=False):
    """Of blocks one by one, or of one stack of them."""
    block = read_names(text)
    if is_scanned:
        return {f"{before}/{path}": ("layers", *axes) for path, axes in block.items()}
    return {f"{before}/{i}/{path}": axes for path, axes in block.items() for i in range(L)}


TOKENS, BATCH_SEQ = jax.ShapeDtypeStruct((B, S), "int32"), (("batch", "seq"),)


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(E)
        self.attention = eqx.nn.MultiheadAttention(H, E, key=key)
        self.mlp = eqx.nn.MLP(E, E, N, 1, jax.nn.gelu, key=key)

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, jnp.tril(jnp.ones((S, S), bool)))
        return x + jax.vmap(self.mlp)(x)


class EquinoxTransformer(eqx.Module):
    tokens: eqx.nn.Embedding
    places: eqx.nn.Embedding
    blocks: Any
    head: eqx.nn.Linear
    is_scanned: bool

    def __init__(self, key, is_scanned=False):
        self.tokens = eqx.nn.Embedding(V, E, key=key)
        self.places = eqx.nn.Embedding(T, E, key=key)
        keys, self.is_scanned = jax.random.split(key, L), is_scanned
        self.blocks = (
            eqx.filter_vmap(EquinoxBlock)(keys) if is_scanned else [*map(EquinoxBlock, keys)]
        )
        self.head = eqx.nn.Linear(E, V, use_bias=False, key=key)

    def __call__(self, tokens):
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.places)(jnp.arange(S))
        if self.is_scanned:
            weights, static = eqx.partition(self.blocks, eqx.is_array)
            x, _ = jax.lax.scan(lambda x, w: (eqx.combine(w, static)(x), None), x, weights)
        else:
            x = functools.reduce(lambda x, block: block(x), self.blocks, x)
        return jax.vmap(self.head)(x)


EQUINOX_BLOCK = (
    "norm/weight E; norm/bias E; attention/query_proj/weight H*P E; "
    "attention/key_proj/weight H*P E; attention/value_proj/weight H*P E; "
    "attention/output_proj/weight E H*P; mlp/layers/0/weight N E; mlp/layers/0/bias N; "
    "mlp/layers/1/weight E N; mlp/layers/1/bias E"
)


def equinox(is_scanned=False):
    model = eqx.filter_eval_shape(EquinoxTransformer, jax.random.key(0), is_scanned)
    ends = read_names("tokens/weight V E; places/weight T E; head/weight V E")
    names = ends | names_of_blocks("blocks", EQUINOX_BLOCK, is_scanned)
    return Model(lambda model, x: jax.vmap(model)(x), model, (TOKENS,), BATCH_SEQ, names)


FLAX_BLOCK = (
    "norm/scale E; norm/bias E; attention/query/kernel E H P; attention/query/bias H P; "
    "attention/key/kernel E H P; attention/key/bias H P; attention/value/kernel E H P; "
    "attention/value/bias H P; attention/out/kernel H P E; attention/out/bias E; "
    "up/kernel E N; up/bias N; down/kernel N E; down/bias E"
)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(E, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, E, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(E, N, rngs=rngs), nnx.Linear(N, E, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(x)))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, E, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(L)])
        self.head = nnx.Linear(E, V, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_transformer():
    model = nnx.eval_shape(lambda: NnxTransformer(nnx.Rngs(0)))
    names = read_names("embed/embedding V E; head/kernel E V")
    names |= names_of_blocks("blocks", FLAX_BLOCK)
    return Model(lambda model, x: model(x), model, (TOKENS,), BATCH_SEQ, names)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm(name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(H, name="attention")(h, h)
        h = nn.gelu(nn.Dense(N, name="up")(x))
        return x + nn.Dense(E, name="down")(h), None


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(V, E, name="embed")(tokens)
        rngs, axes = {"params": True}, {"params": 0}
        blocks = nn.scan(nn.remat(LinenBlock), variable_axes=axes, split_rngs=rngs, length=L)
        x, _ = blocks(name="blocks")(x, None)
        return nn.Dense(V, use_bias=False, name="head")(x)


def linen_transformer():
    module = LinenTransformer()
    names = read_names("params/embed/embedding V E; params/head/kernel E V")
    names |= names_of_blocks("params/blocks", FLAX_BLOCK, is_scanned=True)
    weights = jax.eval_shape(module.init, jax.random.key(0), TOKENS)
    return Model(module.apply, weights, (TOKENS,), BATCH_SEQ, names)


# Without attention


def mixer():
    """One MLP over the positions, one over the channels, of equal lengths."""

    def function(w, x):
        x = x @ w["stem"]
        for own in blocks_of(w):
            x = x + (jax.nn.gelu(x.swapaxes(1, 2) @ own.mix) @ own.back).swapaxes(1, 2)
            x = mlp(own, x)
        return x.mean(1) @ w["head"]

    text = f"stem pixels E; head E O; #.mix patches mixed; #.back mixed patches; {MLP}"
    return make(text, function, "f B patches pixels", patches=E, pixels=E, mixed=N)


def conv_net():
    """Residual blocks; as many rows as columns as channels."""

    def function(w, x):
        x = conv(x, w["stem"])
        for own in blocks_of(w):
            x = x + conv(jax.nn.relu(conv(x, own.up)), own.down)
        return x.mean((1, 2)) @ w["head"]

    text = "stem - - colours channels; #.up - - channels #_inner; #.down - - #_inner channels"
    sizes = {"channels": 8, "0_inner": 8, "1_inner": 8}
    text += "; head channels O"
    return make(text, function, "f B height width colours", height=8, width=8, **sizes)


def recurrent():
    """RWKV: what positions hand on in a loop is not the neurons of the MLP, which are as many."""

    def block(w, x):
        h = norm(x, w.norm)

        def step(state, now):
            key, value = now
            state = state * jnp.exp(-jnp.exp(w.decay)) + jnp.exp(key) * value
            return state, state

        over = [(h @ m).swapaxes(0, 1) for m in (w.key, w.value)]
        made = jax.lax.scan(step, jnp.zeros((B, N)), tuple(over))[1].swapaxes(0, 1)
        return mlp(w, x + (jax.nn.sigmoid(h @ w.gate) * made) @ w.out)

    names = (
        "#.norm E; #.key E recurrent; #.value E recurrent; #.gate E recurrent; #.decay recurrent; "
    )
    return decoder(f"{names}#.out recurrent E; {MLP}", block, "embed V E", recurrent=N)


def lstm():
    """The four gates are one weight; all else is square."""
    cell = eqx.filter_eval_shape(eqx.nn.LSTMCell, E, E, key=jax.random.key(0))

    def function(cell, x):
        def of_one(x):
            start = (jnp.zeros(E), jnp.zeros(E))
            return jax.lax.scan(lambda c, y: (cell(y, c), None), start, x)[0][0]

        return jax.vmap(of_one)(x)

    names = read_names(
        "weight_ih gates*hidden features; weight_hh gates*hidden hidden; bias gates*hidden"
    )
    inputs, axes = (struct(("batch", "seq", "embedding")),), (("batch", "seq", "features"),)
    return Model(function, cell, inputs, axes, names)


def equinox_mlp():
    """Hidden layers are square, and each is an axis of its own."""
    weights = eqx.filter_eval_shape(eqx.nn.MLP, E, E, E, 3, key=jax.random.key(0))
    axes = ["features", "first", "second", "third", "last"]
    names = {f"layers/{i}/weight": (axes[i + 1], axes[i]) for i in range(4)}
    names |= {f"layers/{i}/bias": (axes[i + 1],) for i in range(4)}
    inputs = (struct(("batch", "embedding")),)
    function = lambda model, x: jax.vmap(model)(x)  # noqa: E731
    return Model(function, weights, inputs, (("batch", "features"),), names)


def two_towers():
    """CLIP: images and texts, equally wide, meet in one space that is as wide as both."""

    def tower(w, x):
        for own in blocks_of(vars(w)):
            x = mlp(own, x)
        return x.mean(1) @ w.to

    def function(w, patches, tokens):
        image, text = block_of(w, "image"), block_of(w, "text")
        return tower(image, patches @ image.stem) @ tower(text, text.embed[tokens]).T

    names = "".join(
        f"{t}.#.up {t}_embedding {t}_neurons; {t}.#.down {t}_neurons {t}_embedding; "
        f"{t}.to {t}_embedding both; "
        for t in ("image", "text")
    )
    names += "image.stem pixels image_embedding; text.embed V text_embedding"
    widths = dict.fromkeys(("image_embedding", "text_embedding", "both", "pixels"), E)
    widths |= {"image_neurons": N, "text_neurons": N}
    return make(names, function, "f B patches pixels; i B S", **widths)


# Where something plays the part of something else, and is as long


def trick(text, start=None, end=None, **sizes):
    """A transformer whose start or end is unusual: ``start(w, x, tokens)`` and ``end(w, x)``."""

    def function(w, tokens):
        x = w["embed"][tokens]
        x = x if start is None else start(w, x, tokens)
        for own in blocks_of(w):
            x = mlp(own, x + attention(own, norm(x)))
        return x @ w["head"] if end is None else end(w, x)

    head = "" if "head" in text or end else "; head E V"
    return make(f"embed V E; {text}; {QKVO}{MLP}{head}", function, **sizes)


def taken_by_place(w, x, tokens):
    return x + w["places"][jnp.arange(S)]


def hashed(w, x, tokens):
    return x + w["hashes"][(tokens * 7 + 3) % V]


def convolved(w, x, tokens):
    """Each channel by itself, with as many taps as heads."""
    return x + conv(x[:, None], w["taps"][None, :, None], groups=E)[:, 0]


def perceiver(w, x, tokens):
    """As many latents as heads ask, and tokens answer."""
    latents = jnp.broadcast_to(w["latents"], (B, *w["latents"].shape))
    return latents + attention(block_of(w, "ask"), latents, x, causal=False)


def prefixed(w, x, tokens):
    """As many learned keys and values as heads stand before those of the tokens."""
    own = block_of(w, "ask")
    q, k, v = (heads_of(x @ m) for m in (own.q, own.k, own.v))
    k, v = (
        jnp.concatenate([jnp.broadcast_to(w[p], (B, *w[p].shape)), y], 1)
        for p, y in (("keys", k), ("values", v))
    )
    return x + attend(q, k, v, causal=False) @ own.o


def stages():
    """Two streams of equal width, with a projection between."""

    def function(w, tokens):
        first, second = block_of(w, "stages.0"), block_of(w, "stages.1")
        x = w["embed"][tokens]
        x = mlp(first, x + attention(first, x)) @ w["between"]
        return mlp(second, x + attention(second, x))

    text, sizes = f"{QKVO}{MLP}".replace("#.", "stages.#."), {}
    for letter in "EHPN":
        name, size = AXES[letter]
        sizes |= {f"stages_{i}_{name}": size for i in range(2)}
        for before in " *":
            text = text.replace(before + letter, f"{before}stages_#_{name}")
    ends = "embed V stages_0_embedding; between stages_0_embedding stages_1_embedding"
    return make(f"{ends}; {text}", function, **sizes)


ASK = QKVO.replace("#.", "ask.").removesuffix("; ")


def bins(w, x):
    return x @ w["bins"], x @ w["head"]


def gates(w, x):
    return jax.nn.sigmoid(x @ w["gates"]).mean(-1)


# By title: what makes a model, and how many of its weights are named as its author has it. All
# others have open dimensions, but for those of ``WRONG_NAMES``.
MODELS = {
    "Llama of torch": (llama, 20),
    "Llama, neighbours rotated": (lambda: llama(turn=lambda x: rotate(x, True)), 20),
    "Llama, grouped queries, its gradients": (lambda: gradients(llama(grouped)), 19),
    "Llama, attention of JAX": (lambda: llama(of_jax), 20),
    "Llama, keys in a cache": (lambda: llama(cached), 20),
    "Llama, mapped over heads": (lambda: llama(mapped), 20),
    "Llama with LoRA": (lambda: llama(more="; #.a R E; #.b G*Q*P R", change=add_lora), 24),
    "GPT-2": (gpt2, 20),
    "GPT-2, its gradients": (lambda: gradients(gpt2()), 20),
    "GPT-NeoX, heads first": (lambda: gpt2(has_heads_first=True), 16),
    "Gemma, one key": (gemma, 15),
    "Phi-3, joined unequally": (phi3, 8),
    "T5": (t5, 33),
    "T5, its gradients": (lambda: gradients(t5()), 33),
    "BERT": (bert, 17),
    "ViT": (vit, 15),
    "scanned": (scanned, 9),
    "scanned, its gradients": (lambda: gradients(scanned()), 9),
    "experts for all tokens": (lambda: mixture(all_experts), 16),
    "Switch, tokens dispatched": (lambda: mixture(dispatched), 16),
    "Megablox, tokens sorted": (lambda: mixture(sorted_by_expert), 14),
    "Mixtral, experts apart": (experts_apart, 28),
    "Equinox transformer": (equinox, 23),
    "Equinox, scanned": (lambda: equinox(is_scanned=True), 13),
    "NNX transformer": (nnx_transformer, 30),
    "linen transformer, scanned": (linen_transformer, 16),
    "Mixer": (mixer, 6),
    "convolutions": (conv_net, 0),
    "RWKV": (recurrent, 17),
    "Equinox LSTM": (lstm, 0),
    "Equinox MLP": (equinox_mlp, 0),
    "two towers": (two_towers, 10),
    "as many positions as words": (lambda: trick("places T E", taken_by_place, positions=V), 15),
    "as many hashes as words": (lambda: trick("hashes h E", hashed, h=V), 12),
    "as many bins as words": (lambda: trick("bins E b; head E V", end=bins, b=V), 13),
    "as many gates as neurons": (lambda: trick("gates E g", end=gates, g=N), 13),
    "as many taps as heads": (lambda: trick("taps - E", convolved), 15),
    "as many latents as heads": (lambda: trick(f"latents many E; {ASK}", perceiver), 14),
    "as many learned keys": (lambda: trick(f"keys k H P; values k H P; {ASK}", prefixed), 18),
    "two stages": (stages, 14),
}

# By title: the dimensions that get another name than their author's.
WRONG_NAMES = {
    # Its results are of latents, and nothing ties them to tokens.
    "as many latents as heads": {("head", 1, "outputs")},
}
