"""The main job on real text: from a plan to a restore on another mesh, in numbered steps.

The text is Python's own help pages, read by a small transformer of Penzai letter by letter.
"""

import pathlib
import pydoc_data.topics
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz
from penzai.models.transformer import model_parts
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs

_RULES = {"embedding": "data", "neurons": "model", "heads": "model", "vocabulary": "model"}
_OTHER_RULES = {"embedding": "model", "neurons": "data", "vocabulary": "data"}
_SEQUENCES, _LENGTH, _STEPS = 16, 64, 150
_CONFIG = llamalike_common.LlamalikeTransformerConfig(
    num_kv_heads=4,
    query_head_multiplier=1,
    embedding_dim=64,
    projection_dim=16,
    mlp_hidden_dim=128,
    num_decoder_blocks=2,
    vocab_size=128,
    mlp_variant="swiglu",
    tie_embedder_and_logits=True,
)


def run_demo(out: pathlib.Path | None = None) -> None:
    """Runs the demo and prints what it does.

    Args:
        out: A folder for the checkpoint, which stays; without it a temporary one is used.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(out or temporary) / "step"
        mesh, other_mesh = _make_meshes()
        edited = _edit(_build(mesh), mesh)
        layers = pz.select(edited).at_instances_of(pzs.ConstrainShardingByName)
        _say(3, f"edited by a selector: {layers.count()} layers split the batch after the blocks")
        state = _train(edited, mesh)
        path = pzs.save_train_state(folder, state, overwrite=True)
        _say(5, f"saved to {path}: {pzs.describe_checkpoint(path).verdict}")
        _restore(folder, state, other_mesh)


def _say(number: int, text: str) -> None:
    print(f"{number}. {text}", flush=True)


def _make_meshes() -> tuple[Any, Any]:
    """A mesh over the devices, and the same devices the other way round."""
    count = 1 << min(3, len(jax.devices()).bit_length() - 1)
    devices, sizes = jax.devices()[:count], (max(count // 2, 1), min(count, 2))
    there, back = (
        pzs.make_mesh(dict(zip(("data", "model"), lengths, strict=True)), devices)
        for lengths in (sizes, sizes[::-1])
    )
    return there, back


def _new_model(key: jax.Array) -> Any:
    return llamalike_common.build_llamalike_transformer(_CONFIG, init_base_rng=key)


def _build(mesh: Any) -> Any:
    plan = pzs.make_plan(pzs.abstract_model(_new_model, jax.random.key(0)), mesh, _RULES)
    _say(1, f"planned from shapes: {str(plan).splitlines()[0]}")
    model = pzs.sharded_init(_new_model, jax.random.key(0), mesh=mesh, rules=_RULES)
    name = "transformer/block_0/mlp/out_linear.weights"
    weights = pz.select(model).at_instances_of(pz.Parameter).where(lambda p: p.label == name).get()
    _say(2, f"initialised in place: {name} lies as {weights.value.data_array.sharding.spec}")
    return model


def _edit(model: Any, mesh: Any) -> Any:
    layer = pzs.ConstrainShardingByName(mesh, {"batch": "data"})
    return pz.select(model).at_instances_of(model_parts.TransformerBlock).insert_after(layer)


def _read_text() -> np.ndarray:
    text = "\n".join(pydoc_data.topics.topics.values())
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)


def _draw_batches(text: np.ndarray) -> Iterator[dict[str, Any]]:
    draw = np.random.default_rng(0)
    while True:
        starts = draw.integers(len(text) - _LENGTH - 1, size=_SEQUENCES)
        rows = np.stack([text[start : start + _LENGTH + 1] for start in starts])
        yield {"tokens": pz.nx.wrap(jnp.asarray(rows)).tag("batch", "seq")}


def _loss(model: Any, rng: Any, state: Any, tokens: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Nats per letter, of the letters that follow."""
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    loss = pzs.cross_entropy(logits, tokens[{"seq": pz.slice[1:]}])
    return loss, state, {"loss": loss}


def _train(model: Any, mesh: Any) -> Any:
    step = pzs.build_train_step_fn(_loss, donate_params_and_state=True)
    state = pzs.TrainState.initial_state(model, optax.adam(1e-2), jax.random.key(1))
    records: list[Any] = []
    options: Any = {"mesh": mesh, "rules": {"batch": "data"}, "on_log": records.append}
    batches = _draw_batches(_read_text())
    state = pzs.fit(state, step, batches, steps=_STEPS, log_every=1, **options)
    first, last = records[0].loss, np.mean([record.loss for record in records[-10:]])
    _say(4, f"trained {_STEPS} steps: from {first:.2f} to {last:.2f} nats per letter")
    return state


def _restore(folder: pathlib.Path, saved: Any, mesh: Any) -> None:
    model = _edit(pzs.abstract_model(_new_model, jax.random.key(0)), mesh)
    shapes = pzs.TrainState.initial_state(model, optax.adam(1e-2), jax.random.key(1))
    restored = pzs.restore_train_state(folder, shapes, mesh, _OTHER_RULES)
    compared = pzs.compare_checkpoints(saved, restored)
    _say(6, f"restored on {dict(mesh.shape)}, and compared to the bit: {compared.verdict}")
