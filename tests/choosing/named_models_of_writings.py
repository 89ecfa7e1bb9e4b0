"""One transformer as many hands write it: by slices, loops, chunks, windows, groups, caches."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    HEADS,
    NEURONS,
    PROJECTION,
    SEQ,
    TOKENS,
    VOCABULARY,
    NamedModel,
    causal,
    rms_norm,
    rotary_half,
    struct,
    structs_of,
)
from tests.choosing.transformer_parts import (
    INNER,
    attend,
    attention,
    attention_names,
    gated,
    gated_names,
    linear,
    linear_names,
    mlp,
    mlp_names,
    norm,
    norm_names,
    split_heads,
)


def _decoder(block_names, block, layers=3, tail=None, **lengths) -> NamedModel:
    """Blocks between a table of tokens and logits; ``tail`` makes what is returned."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("vocabulary", "embedding")}
    for i in range(layers):
        names |= {f"{i}.{path}": axes for path, axes in block_names.items()}

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(layers):
            x = block({path: w[f"{i}.{path}"] for path in block_names}, x)
        return x @ w["head"].T if tail is None else tail(w, x, tokens)

    weights = structs_of(names, **lengths)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names)


_PLAIN = attention_names("attention") | mlp_names("mlp") | norm_names("norm")


def _plain(w, x):
    x = x + attention(w, "attention", norm(w, "norm", x), is_causal=True)
    return x + mlp(w, "mlp", x)


def heads_by_slices() -> NamedModel:
    """Each head is cut out of queries, keys and values by its place, and all are joined again."""

    def block(w, x):
        q, k, v = (linear(w, f"attention.{name}", norm(w, "norm", x)) for name in "qkv")
        made = []
        for head in range(HEADS):
            own = slice(head * PROJECTION, (head + 1) * PROJECTION)
            scores = causal(q[..., own] @ k[..., own].swapaxes(-1, -2) * 0.5)
            made.append(scores @ v[..., own])
        x = x + linear(w, "attention.o", jnp.concatenate(made, -1))
        return x + mlp(w, "mlp", x)

    return _decoder(_PLAIN, block)


def positions_first() -> NamedModel:
    """PyTorch's encoder layer: positions before the batch, heads with the batch, a weight cut."""
    names = {"encoder.weight": ("vocabulary", "embedding"), "pos": ("positions", "embedding")}
    for i in range(3):
        path = f"layers.{i}"
        names |= {f"{path}.self_attn.in_proj_weight": ("qkv*heads*projection", "embedding")}
        names |= {f"{path}.self_attn.in_proj_bias": ("qkv*heads*projection",)}
        names |= linear_names(f"{path}.self_attn.out_proj", "embedding", INNER)
        names |= linear_names(f"{path}.linear1", "neurons", "embedding")
        names |= linear_names(f"{path}.linear2", "embedding", "neurons")
        names |= norm_names(f"{path}.norm1") | norm_names(f"{path}.norm2")
    names |= linear_names("decoder", "vocabulary", "embedding")

    def attended(w, path, x):
        weight, bias = w[f"{path}.in_proj_weight"], w[f"{path}.in_proj_bias"]
        parts = [slice(n * EMBEDDING, (n + 1) * EMBEDDING) for n in range(3)]
        q, k, v = (
            (x @ weight[part].T + bias[part])
            .reshape(SEQ, BATCH * HEADS, PROJECTION)
            .transpose(1, 0, 2)
            for part in parts
        )
        made = causal(q * 0.5 @ k.transpose(0, 2, 1)) @ v
        made = made.transpose(1, 0, 2).reshape(SEQ, BATCH, EMBEDDING)
        return linear(w, f"{path}.out_proj", made)

    def function(w, tokens):
        x = w["encoder.weight"][tokens] * EMBEDDING**0.5 + w["pos"][:SEQ][:, None]
        for i in range(3):
            path = f"layers.{i}"
            x = norm(w, f"{path}.norm1", x + attended(w, f"{path}.self_attn", x))
            h = jax.nn.relu(linear(w, f"{path}.linear1", x))
            x = norm(w, f"{path}.norm2", x + linear(w, f"{path}.linear2", h))
        return linear(w, "decoder", x)

    tokens = struct(SEQ, BATCH, dtype=jnp.int32)
    return NamedModel(function, structs_of(names), (tokens,), (("seq", "batch"),), names)


def loop_of_numbers() -> NamedModel:
    """Layers by ``fori_loop``, each weight indexed by the number; keys beside values."""
    block = {"q": (INNER, "embedding"), "kv": ("kv*heads*projection", "embedding")}
    block |= {"o": ("embedding", INNER), "up": ("neurons", "embedding"), "scale": ("embedding",)}
    block |= {"down": ("embedding", "neurons")}
    names = {"embed": ("vocabulary", "embedding"), "head": ("vocabulary", "embedding")}
    names |= {path: ("layers", *axes) for path, axes in block.items()}

    def function(w, tokens):
        def one(tokens):
            def body(number, x):
                own = {
                    path: jax.lax.dynamic_index_in_dim(w[path], number, 0, False) for path in block
                }
                h = rms_norm(x, own["scale"])
                q = (own["q"] @ h.T).reshape(HEADS, PROJECTION, SEQ)
                k, v = (own["kv"] @ h.T).reshape(2, HEADS, PROJECTION, SEQ)
                shares = causal(jnp.einsum("hds,hdt->hst", q, k))
                made = jnp.einsum("hst,hdt->shd", shares, v).reshape(SEQ, -1)
                x = x + made @ own["o"].T
                return x + jax.nn.gelu(x @ own["up"].T) @ own["down"].T

            x = jax.lax.fori_loop(0, 3, body, w["embed"][tokens])
            return x @ w["head"].T

        return jax.lax.map(one, tokens)

    return NamedModel(function, structs_of(names, layers=3, kv=2), (TOKENS,), BATCH_SEQ, names)


def generating() -> NamedModel:
    """Tokens are made one after the other, each looked up again, with caches that loops write."""
    names = {"embed": ("vocabulary", "embedding"), "head": ("vocabulary", "embedding")}
    for i in range(2):
        names |= {f"{i}.{path}": axes for path, axes in _PLAIN.items()}

    def function(w, tokens):
        def step(carry, number):
            token, caches = carry
            x = w["embed"][token]
            kept = []
            for i, (keys, values) in enumerate(caches):
                own = {path: w[f"{i}.{path}"] for path in _PLAIN}
                h = norm(own, "norm", x)
                q, k, v = (
                    linear(own, f"attention.{n}", h).reshape(BATCH, HEADS, PROJECTION)
                    for n in "qkv"
                )
                keys = jax.lax.dynamic_update_slice(keys, k[:, None], (0, number, 0, 0))
                values = jax.lax.dynamic_update_slice(values, v[:, None], (0, number, 0, 0))
                scores = jnp.einsum("bhd,bshd->bhs", q, keys)
                scores = jnp.where(jnp.arange(SEQ) <= number, scores, -1e9)
                made = jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), values)
                x = x + linear(own, "attention.o", made.reshape(BATCH, -1))
                x = x + mlp(own, "mlp", x)
                kept.append((keys, values))
            token = jnp.argmax(x @ w["head"].T, -1)
            return (token, tuple(kept)), token

        empty = jnp.zeros((BATCH, SEQ, HEADS, PROJECTION))
        start = (tokens[:, 0], ((empty, empty),) * 2)
        return jax.lax.scan(step, start, jnp.arange(SEQ))[1].T

    return NamedModel(function, structs_of(names), (TOKENS,), BATCH_SEQ, names)


def vocabulary_in_chunks() -> NamedModel:
    """The loss goes through the vocabulary by chunks, so that logits are never whole."""

    def tail(w, x, tokens):
        chunks = w["head"].reshape(4, VOCABULARY // 4, EMBEDDING)

        def step(total, chunk):
            number, rows = chunk
            logits = x @ rows.T
            place = tokens - number * (VOCABULARY // 4)
            is_here = (place >= 0) & (place < VOCABULARY // 4)
            place = jnp.clip(place, 0, VOCABULARY // 4 - 1)[..., None]
            own = jnp.take_along_axis(logits, place, -1)[..., 0]
            most, right = total
            most = jnp.logaddexp(most, jax.nn.logsumexp(logits, -1))
            return (most, right + jnp.where(is_here, own, 0.0)), None

        start = (jnp.full((BATCH, SEQ), -1e9), jnp.zeros((BATCH, SEQ)))
        (most, right), _ = jax.lax.scan(step, start, (jnp.arange(4), chunks))
        return (most - right).mean()

    return _decoder(_PLAIN, _plain, tail=tail)


def padded_vocabulary() -> NamedModel:
    """Tables are longer than the vocabulary, so that they divide; logits are cut to its length."""

    def tail(w, x, tokens):
        return (x @ w["head"].T)[..., : VOCABULARY - 5]

    return _decoder(_PLAIN, _plain, tail=tail)


def windows_with_those_before() -> NamedModel:
    """Each window attends to itself and the one before, which is joined to it."""

    def block(w, x):
        q, k, v = (
            linear(w, f"attention.{name}", norm(w, "norm", x)).reshape(
                BATCH, 2, SEQ // 2, HEADS, PROJECTION
            )
            for name in "qkv"
        )
        k, v = (
            jnp.concatenate([jnp.pad(y, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))[:, :-1], y], 2)
            for y in (k, v)
        )
        scores = jnp.einsum("bwqhd,bwkhd->bwhqk", q, k)
        places = jnp.arange(SEQ // 2)[:, None] + SEQ // 2 - jnp.arange(SEQ)
        scores = jnp.where((places >= 0) & (places < SEQ // 2), scores, -1e9)
        made = jnp.einsum("bwhqk,bwkhd->bwqhd", jax.nn.softmax(scores), v)
        x = x + linear(w, "attention.o", made.reshape(x.shape))
        return x + mlp(w, "mlp", x)

    return _decoder(_PLAIN, block)


def product_keys() -> NamedModel:
    """A memory in place of the MLP: the best of two halves' keys point to rows of a table."""
    names = (
        attention_names("attention")
        | norm_names("norm")
        | {
            "memory.query": ("embedding", "halves*half"),
            "memory.keys": ("halves", "keys", "half"),
            "memory.values": ("memories", "embedding"),
        }
    )

    def block(w, x):
        x = x + attention(w, "attention", norm(w, "norm", x), is_causal=True)
        q = (x @ w["memory.query"]).reshape(BATCH, SEQ, 2, -1)
        scores = jnp.einsum("bsad,akd->bsak", q, w["memory.keys"])
        best, chosen = jax.lax.top_k(scores, 2)
        total = (best[:, :, 0, :, None] + best[:, :, 1, None]).reshape(BATCH, SEQ, 4)
        places = (chosen[:, :, 0, :, None] * 8 + chosen[:, :, 1, None]).reshape(BATCH, SEQ, 4)
        total, order = jax.lax.top_k(total, 2)
        places = jnp.take_along_axis(places, order, -1)
        return x + jnp.einsum("bsk,bske->bse", jax.nn.softmax(total), w["memory.values"][places])

    lengths = {"halves": 2, "half": 8, "keys": 8, "memories": 64}
    return _decoder(names, block, **lengths)


def learning_while_reading() -> NamedModel:
    """TTT: a matrix for each head takes a step of gradient descent at every position."""
    names = dict.fromkeys("qkv", (INNER, "embedding")) | {
        "o": ("embedding", INNER),
        "W": ("heads", "projection", "projection"),
        "rate": ("heads", "embedding"),
    }
    names |= gated_names("mlp")

    def block(w, x):
        q, k, v = (
            (x @ w[name].T).reshape(BATCH, SEQ, HEADS, PROJECTION).transpose(1, 0, 2, 3)
            for name in "qkv"
        )
        rates = jax.nn.sigmoid(jnp.einsum("bse,he->sbh", x, w["rate"]))

        def loss(matrix, k, v):
            return 0.5 * jnp.sum((jnp.einsum("bhd,bhdf->bhf", k, matrix) - v) ** 2)

        def step(matrix, now):
            q, k, v, rate = now
            matrix = matrix - rate[..., None, None] * jax.grad(loss)(matrix, k, v)
            return matrix, jnp.einsum("bhd,bhdf->bhf", q, matrix)

        start = jnp.broadcast_to(w["W"], (BATCH, *w["W"].shape))
        _, made = jax.lax.scan(step, start, (q, k, v, rates))
        x = x + made.transpose(1, 0, 2, 3).reshape(x.shape) @ w["o"].T
        return x + gated(w, "mlp", x)

    made = _decoder(names, block)
    return NamedModel(
        made.function, made.weights, made.inputs, made.input_names, made.names, {}, False
    )


def quantised_by_groups() -> NamedModel:
    """Integers with a scale for each group of inputs, as GPTQ and AWQ store a Llama."""
    names, linears = {}, {}
    for path in ("q", "k", "v"):
        linears[f"self_attn.{path}_proj"] = ("embedding", INNER)
    linears["self_attn.o_proj"] = (INNER, "embedding")
    linears |= {f"mlp.{name}_proj": ("embedding", "neurons") for name in ("gate", "up")}
    linears["mlp.down_proj"] = ("neurons", "embedding")
    for path, (into, out) in linears.items():
        groups = {"embedding": "embedding_groups", INNER: "inner_groups"}.get(into, "neuron_groups")
        names |= {f"{path}.qweight": (into, out), f"{path}.scales": (groups, out)}
    names |= {"input_layernorm": ("embedding",)}

    def dense(w, path, x):
        weight, scales = w[f"{path}.qweight"], w[f"{path}.scales"]
        grouped = weight.reshape(len(scales), -1, weight.shape[1]).astype(x.dtype)
        return x @ (grouped * scales[:, None]).reshape(weight.shape)

    def block(w, x):
        h = rms_norm(x, w["input_layernorm"])
        q, k, v = (split_heads(dense(w, f"self_attn.{name}_proj", h)) for name in "qkv")
        made = attend(rotary_half(q), rotary_half(k), v, is_causal=True)
        x = x + dense(w, "self_attn.o_proj", made)
        hidden = jax.nn.silu(dense(w, "mlp.gate_proj", x)) * dense(w, "mlp.up_proj", x)
        return x + dense(w, "mlp.down_proj", hidden)

    lengths = {"embedding_groups": 2, "inner_groups": 2, "neuron_groups": 4}
    made = _decoder(names, block, **lengths)
    weights = {
        path: struct(*each.shape, dtype=jnp.int8) if path.endswith("qweight") else each
        for path, each in made.weights.items()
    }
    return NamedModel(made.function, weights, made.inputs, made.input_names, made.names)


def norms_of_groups() -> NamedModel:
    """The residual stream is normed by groups of features."""

    def grouped(w, x):
        groups = x.reshape(*x.shape[:-1], 4, -1)
        centred = groups - groups.mean(-1, keepdims=True)
        centred = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
        return centred.reshape(x.shape) * w["norm.weight"] + w["norm.bias"]

    def block(w, x):
        x = x + attention(w, "attention", grouped(w, x), is_causal=True)
        return x + mlp(w, "mlp", grouped(w, x))

    return _decoder(_PLAIN, block)


def patches_by_reshape() -> NamedModel:
    """Patches by a reshape of rows and columns, rotated by both; a head for each patch."""
    names = {"patches": ("patch", "embedding"), "head": ("embedding", "classes")}
    for i in range(3):
        names |= {f"{i}.{path}": axes for path, axes in _PLAIN.items()}

    def rotated(x):
        x = x.reshape(BATCH, HEADS, 4, 4, PROJECTION)
        rows, columns = jnp.split(x, 2, axis=-1)
        rows = rotary_half(rows.swapaxes(2, 3)).swapaxes(2, 3)
        return jnp.concatenate([rows, rotary_half(columns)], -1).reshape(BATCH, HEADS, 16, -1)

    def function(w, pictures):
        x = pictures.reshape(BATCH, 4, 2, 4, 2, 4).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(BATCH, 16, 16) @ w["patches"]
        for i in range(3):
            own = {path: w[f"{i}.{path}"] for path in _PLAIN}
            h = norm(own, "norm", x)
            q, k, v = (split_heads(linear(own, f"attention.{name}", h)) for name in "qkv")
            x = x + linear(own, "attention.o", attend(rotated(q), rotated(k), v))
            x = x + mlp(own, "mlp", x)
        return x @ w["head"]

    weights = structs_of(names, patch=16, classes=NEURONS)
    inputs, axes = (struct(BATCH, 8, 8, 4),), (("batch", "height", "width", "colours"),)
    return NamedModel(function, weights, inputs, axes, names, {"classes": "outputs"})


WRITINGS = {
    "positions before the batch (torch)": positions_first,
    "layers by fori_loop": loop_of_numbers,
    "generating in a loop": generating,
    "vocabulary in chunks": vocabulary_in_chunks,
    "padded vocabulary": padded_vocabulary,
    "windows with those before": windows_with_those_before,
    "norms of groups": norms_of_groups,
    "patches by a reshape": patches_by_reshape,
}

WRITINGS_LEFT_OPEN = {
    "heads by slices": heads_by_slices,
    "learning while reading (TTT)": learning_while_reading,
    "memory of product keys": product_keys,
    "quantised by groups": quantised_by_groups,
}
