"""Capsules, memories, agents, trains of cores: what only looks like attention, or like experts."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH,
    BATCH_SEQ,
    EMBEDDING,
    NEURONS,
    SEQ,
    TOKENS,
    NamedModel,
    struct,
    structs_of,
)

_INDEX = struct(BATCH, dtype=jnp.int32)
_PAIR = (("batch", "seq"), ("batch",))
_STREAM = {"embed": ("vocabulary", "embedding")}


def capsules() -> NamedModel:
    """Capsules agree on what to give to which; those that get it are as many as a pose is long."""
    names = {
        "stem": ("pixels", "hidden"),
        "primary": ("hidden", "primaries*pose"),
        "routes": ("primaries", "digits", "pose", "digit_pose"),
        "decoder.0": ("digits*digit_pose", "decoder_hidden"),
        "decoder.1": ("decoder_hidden", "shown"),
    }

    def squashed(x):
        length = jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x * length / (1 + length**2)

    def function(w, x):
        low = squashed((jax.nn.relu(x @ w["stem"]) @ w["primary"]).reshape(BATCH, 8, 4))
        votes = jnp.einsum("bie,ijed->bijd", low, w["routes"])
        agreed = jnp.zeros((BATCH, 8, 4))
        for _ in range(3):
            high = squashed(jnp.einsum("bij,bijd->bjd", jax.nn.softmax(agreed, 2), votes))
            agreed = agreed + jnp.einsum("bijd,bjd->bij", votes, high)
        lengths = jnp.linalg.norm(high, axis=-1)
        high = high * jax.nn.one_hot(lengths.argmax(-1), 4)[..., None]
        return lengths, jax.nn.relu(high.reshape(BATCH, -1) @ w["decoder.0"]) @ w["decoder.1"]

    lengths = dict.fromkeys(("pixels", "hidden", "decoder_hidden", "shown"), EMBEDDING)
    lengths |= {"primaries": 8, "pose": 4, "digits": 4, "digit_pose": 4}
    inputs, axes = (struct(BATCH, EMBEDDING),), (("batch", "pixels"),)
    return NamedModel(function, structs_of(names, **lengths), inputs, axes, names, {}, False)


def memories() -> NamedModel:
    """End-to-end memory networks: sentences are bags of words by three tables, asked in hops."""
    names = {"question": ("words", "width"), "hop": ("width", "width")}
    names |= {"answer": ("width", "answers")}
    for hop in range(2):
        names |= {
            f"{hop}.keys": (f"words_{hop}", "width"),
            f"{hop}.key_times": ("stories", "width"),
        }
        names |= {f"{hop}.values": (f"told_{hop}", "width")}
        names |= {f"{hop}.value_times": ("stories", "width")}

    def function(w, story, question):
        asked = w["question"][question].sum(1)
        for hop in range(2):
            keys, values = (
                w[f"{hop}.{name}s"][story].sum(2) + w[f"{hop}.{name}_times"]
                for name in ("key", "value")
            )
            shares = jax.nn.softmax(jnp.einsum("bme,be->bm", keys, asked))
            asked = asked @ w["hop"] + jnp.einsum("bm,bme->be", shares, values)
        return asked @ w["answer"]

    rows = ("words", "answers", *(f"{name}_{hop}" for name in ("words", "told") for hop in "01"))
    lengths = dict.fromkeys((*rows, "width"), EMBEDDING) | {"stories": SEQ}
    inputs = (struct(BATCH, SEQ, 4, dtype=jnp.int32), struct(BATCH, 4, dtype=jnp.int32))
    axes = (("batch", "stories", None), ("batch", None))
    return NamedModel(function, structs_of(names, **lengths), inputs, axes, names, {}, False)


def truncated_quantiles() -> NamedModel:
    """TQC: members of an ensemble of critics, as many as quantiles and as bins of the actor."""
    names = {"critic.stem": ("members", "joined", "critic_width")}
    for block in range(2):
        names |= {f"critic.{block}.up": ("members", "critic_width", f"critic_neurons_{block}")}
        names |= {f"critic.{block}.down": ("members", f"critic_neurons_{block}", "critic_width")}
    names |= {"critic.out": ("members", "critic_width", "quantiles")}
    names |= {"actor.stem": ("observed", "embedding"), "actor.up": ("embedding", "neurons")}
    names |= {"actor.down": ("neurons", "embedding"), "actor.bins": ("embedding", "bins")}

    def function(w, observed, acted):
        def critic(w):
            x = jnp.concatenate([observed, acted], -1) @ w["critic.stem"]
            for block in range(2):
                x = x + jax.nn.relu(x @ w[f"critic.{block}.up"]) @ w[f"critic.{block}.down"]
            return x @ w["critic.out"]

        members = {path: each for path, each in w.items() if path.startswith("critic")}
        values = jax.vmap(critic)(members).swapaxes(0, 1).reshape(BATCH, -1)
        x = observed @ w["actor.stem"]
        x = x + jax.nn.relu(x @ w["actor.up"]) @ w["actor.down"]
        return jax.lax.top_k(-values, 12)[0], jax.lax.top_k(x @ w["actor.bins"], 2)[0]

    lengths = dict.fromkeys(("joined", "critic_width"), EMBEDDING) | {"observed": 12}
    lengths |= {"critic_neurons_0": NEURONS, "critic_neurons_1": NEURONS}
    lengths |= dict.fromkeys(("members", "quantiles", "bins"), 4)
    inputs = (struct(BATCH, 12), struct(BATCH, 4))
    axes = (("batch", "observed"), ("batch", "acted"))
    return NamedModel(function, structs_of(names, **lengths), inputs, axes, names, {}, False)


def tensor_trains() -> NamedModel:
    """Matrices of MLPs are trains of two cores, which have factors of embedding and neurons."""
    names = {"embed": ("vocabulary", "columns*more_columns")}
    for block in range(2):
        for name, into, out in (("up", "columns", "rows"), ("down", "rows", "columns")):
            bond = f"{name}_bond_{block}"
            names[f"{block}.{name}.0"] = (into, out, bond)
            names[f"{block}.{name}.1"] = (bond, f"more_{into}", f"more_{out}")

    def mapped(w, path, x):
        x = jnp.einsum("bsij,iar->bsjar", x.reshape(BATCH, SEQ, 4, 4), w[f"{path}.0"])
        return jnp.einsum("bsjar,rjc->bsac", x, w[f"{path}.1"]).reshape(BATCH, SEQ, EMBEDDING)

    def function(w, tokens):
        x = w["embed"][tokens]
        for block in range(2):
            x = x + mapped(w, f"{block}.down", jax.nn.gelu(mapped(w, f"{block}.up", x)))
        return x @ w["embed"].T

    lengths = dict.fromkeys(("columns", "more_columns", "rows", "more_rows"), 4)
    lengths |= {f"{name}_bond_{block}": 3 for name in ("up", "down") for block in range(2)}
    weights = structs_of(names, **lengths)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {}, False)


def adapters_by_number() -> NamedModel:
    """Each request has the number of the adapter of low rank that serves it."""
    names = dict(_STREAM)
    for path, into, out in (("up", "embedding", "neurons"), ("down", "neurons", "embedding")):
        names |= {path: (into, out), f"{path}.a": ("adapters", into, f"{path}_rank")}
        names |= {f"{path}.b": ("adapters", f"{path}_rank", out)}

    def function(w, tokens, number):
        def adapted(path, x):
            first, second = w[f"{path}.a"][number], w[f"{path}.b"][number]
            return x @ w[path] + jnp.einsum("bsi,bir,bro->bso", x, first, second)

        x = w["embed"][tokens]
        for _ in range(2):
            x = x + adapted("down", jax.nn.silu(adapted("up", x)))
        return x @ w["embed"].T

    weights = structs_of(names, adapters=4, up_rank=2, down_rank=2)
    return NamedModel(function, weights, (TOKENS, _INDEX), _PAIR, names, {}, False)


def heads_by_number() -> NamedModel:
    """Each example has the number of its task, whose head is picked, with as many classes."""
    names = _STREAM | {"up": ("embedding", "neurons"), "down": ("neurons", "embedding")}
    names |= {"scales": ("tasks", "embedding"), "hidden": ("tasks", "embedding", "task_hidden")}
    names |= {"heads": ("tasks", "task_hidden", "classes")}

    def function(w, tokens, task):
        x = w["embed"][tokens]
        for _ in range(2):
            x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
        x = x.mean(1) * w["scales"][task]
        x = jax.nn.relu(jnp.einsum("be,ben->bn", x, w["hidden"][task]))
        return jnp.einsum("bn,bno->bo", x, w["heads"][task])

    weights = structs_of(names, tasks=4, task_hidden=EMBEDDING, classes=4)
    return NamedModel(function, weights, (TOKENS, _INDEX), _PAIR, names, {}, False)


def dense_states() -> NamedModel:
    """A linear state goes along positions by a dense matrix; what is read of it is gated."""
    names = dict(_STREAM) | {"head": ("embedding", "vocabulary")}
    for block in range(2):
        state = f"state_{block}"
        names |= {f"{block}.kept": (state, state), f"{block}.into": ("embedding", state)}
        names |= {f"{block}.out": (state, "embedding"), f"{block}.gate": ("embedding", "embedding")}
        names |= {f"{block}.past": ("embedding",), f"{block}.start": (state,)}

    def function(w, tokens):
        x = w["embed"][tokens]
        for block in range(2):

            def step(state, each, block=block):
                state = state @ w[f"{block}.kept"] + each @ w[f"{block}.into"]
                return state, state @ w[f"{block}.out"] + each * w[f"{block}.past"]

            start = jnp.broadcast_to(w[f"{block}.start"], (BATCH, NEURONS))
            made = jax.lax.scan(step, start, x.swapaxes(0, 1))[1].swapaxes(0, 1)
            x = x + made * jax.nn.sigmoid(x @ w[f"{block}.gate"])
        return x @ w["head"]

    weights = structs_of(names, state_0=NEURONS, state_1=NEURONS)
    return NamedModel(function, weights, (TOKENS,), BATCH_SEQ, names, {}, False)


AGREEMENTS = {
    "capsules": capsules,
    "memory network": memories,
    "truncated quantiles": truncated_quantiles,
    "tensor trains": tensor_trains,
    "adapters by number": adapters_by_number,
    "heads by number": heads_by_number,
    "dense states": dense_states,
}
