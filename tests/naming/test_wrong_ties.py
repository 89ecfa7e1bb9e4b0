"""Small programs in which lengths, shapes or places look as if dimensions were one that are not.

All lengths are equal wherever they can be, and paths say nothing.
"""

import jax
import jax.numpy as jnp
import pytest

import penzai_shard as pzs
from penzai_shard.naming.trace import trace_call
from tests.naming import models
from tests.naming.models import make
from tests.naming.oracle import compare_ties

SHORT = {"both": 8, "c": 3, "h": 2, "d": 2, "g": 2, "q": 2, "u": 2}
BATCH, SEQ = "f batch features", "f batch seq features"


def mixed(w, x):
    """A reshape without a transpose: a row is of several positions and some features."""
    rows = (x @ w["a"]).reshape(8, 4, 2)
    return jnp.einsum("hsd,htd->hst", rows, rows)


def flattened(w, x):
    return x.reshape(4, 16) @ w["a"], x.swapaxes(1, 2).reshape(4, 16) @ w["b"]


def between_features(w, x):
    """Scores are of features by features."""
    q, k, v = (jnp.einsum("bsf,fo->bso", x, w[name]) for name in "abc")
    return jnp.einsum("bij,bsj->bsi", jax.nn.softmax(jnp.einsum("bsi,bsj->bij", q, k)), v)


def ensemble(w, x):
    return jax.vmap(lambda a, b: jnp.tanh(x @ a) @ b)(w["a"], w["b"]).mean(0)


def nearest_code(w, x):
    distances = ((x[:, None] - w["a"]) ** 2).sum(-1)
    return w["a"][jnp.argmin(distances, -1)] @ w["b"]


def either(w, x):
    first, second = (lambda x, n=n: jnp.tanh(x @ w[n[0]]) @ w[n[1]] for n in ("ab", "cd"))
    return jax.lax.cond(x.sum() > 0, first, second, x)


def looped(w, x):
    return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w["a"]), x) @ w["b"]


def two_widths(w, s, t):
    return (w["d"][t] + jnp.tanh(w["a"][s] @ w["b"]) @ w["c"]) @ w["e"]


def rotated(w, x):
    q, k = (models.rotate((x @ w[name])[:, :, None]) for name in "ab")
    return jnp.einsum("bqhd,bkhd->bqk", q, k)


def joined_attention(w, x):
    q, k, v = (each.reshape(4, 4, 2, 2) for each in jnp.split(x @ w["a"], 3, -1))
    return models.attend(q, k, v) @ w["b"]


def grouped(w, x):
    q, k = (x @ w["a"]).reshape(4, 4, 4, 2), (x @ w["b"]).reshape(4, 4, 2, 2)
    return jnp.einsum("bshd,bthd->bhst", q, jnp.repeat(k, 2, 2))


def joined_and_cut(w, x):
    made = x @ jnp.concatenate([w["a"], w["b"]], -1)
    return made[:, :4] @ w["c"], made[:, 4:] @ w["d"]


def gated(w, x):
    gate, up = jnp.split(x @ w["a"], 2, -1)
    return (jax.nn.silu(gate) * up) @ w["b"]


def halves(w, x):
    first, second = jnp.split(x @ w["a"], 2, -1)
    return first @ w["b"], second @ w["c"]


CASES = {
    "unrelated squares": ("a features one; b features two", lambda w, x: (x @ w["a"], x @ w["b"])),
    "a chain of squares": (
        "a features one; b one two; c two three",
        lambda w, x: jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"],
    ),
    "as many words as features": (
        "a words width; b width logits",
        lambda w, t: w["a"][t] @ w["b"],
        "i batch seq",
    ),
    "an autoencoder of one weight": (
        "a features hidden",
        lambda w, x: jnp.tanh(x @ w["a"]) @ w["a"].T,
    ),
    "heads of mixed positions": ("a features out", mixed, SEQ),
    "flattened in two orders": ("a seq*features one; b features*seq two", flattened, SEQ),
    "joined outputs": (
        "a features one; b features two; c both out",
        lambda w, x: jnp.concatenate([x @ w["a"], x @ w["b"]], -1) @ w["c"],
    ),
    "tables of users and items": (
        "a users width; b items width",
        lambda w, u, i: (w["a"][u] * w["b"][i]).sum(-1),
        "i batch; i batch",
    ),
    "a bias of positions": ("a seq; b features", lambda w, x: x + w["a"][:, None] + w["b"], SEQ),
    "a bilinear form": (
        "a left right",
        lambda w, x, y: jnp.einsum("bi,ij,bj->b", x, w["a"], y),
        "f batch left; f batch right",
    ),
    "a loop over one weight": ("a features features; b features out", looped),
    "two programs in one": (
        "a features one; b rows columns",
        lambda w, x: (x @ w["a"], (w["b"] ** 2).sum()),
    ),
    "members of an ensemble": ("a members features hidden; b members hidden out", ensemble),
    "codes that are looked up": ("a codes features; b features out", nearest_code),
    "attention between features": (
        "a features asked; b features kept; c features kept",
        between_features,
        SEQ,
    ),
    "frequencies": (
        "a frequencies; b features",
        lambda w, x: (jnp.fft.fft(x).real * w["a"], x * w["b"]),
    ),
    "ranks": ("a ranks; b features", lambda w, x: (jnp.sort(x, -1) * w["a"], x * w["b"])),
    "a Kronecker product": (
        "a in_1 out_1; b in_2 out_2",
        lambda w, x: x @ jnp.kron(w["a"], w["b"]),
        "f batch in_1*in_2",
    ),
    "two widths": (
        "a old old_width; b old_width read; c read width; d new width; e width logits",
        two_widths,
        "i batch seq; i batch seq",
    ),
    "two branches": ("a features one; b one out; c features two; d two out", either),
    # What operations do tie.
    "halves rotated": ("a features depth; b features depth", rotated, SEQ),
    "queries, keys and values in one": ("a features c*h*d; b h*d out", joined_attention, SEQ),
    "groups of queries": ("a features g*q*d; b features g*d", grouped, SEQ),
    "joined and cut again": ("a features f; b features s; c f one; d s two", joined_and_cut),
    "gates next to neurons": ("a features u*n; b n out", gated),
    "halves with different uses": ("a features both; b first one; c second two", halves),
}


@pytest.mark.parametrize("case", CASES)
def test_infer_names_ties_what_an_operation_ties_and_nothing_else(case):
    text, function, *inputs = CASES[case]
    model = make(text, function, *(inputs or [BATCH]), batch=4, seq=4, **SHORT)
    args = (model.function, model.weights, *model.inputs)
    call = trace_call(*args, input_names=model.input_names)
    classes = {weight.path: weight.parts for weight in call.weights}
    assert compare_ties(classes, model.names) == ([], [])
    found = pzs.infer_names(*args, input_names=model.input_names)
    wrong, _ = compare_ties(found, model.names)
    assert wrong == []
