"""The whole job on one small model: plan, initialise, edit, train, save, restore, compare."""

import contextlib
import dataclasses
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock
from penzai.models.transformer.variants import llamalike_common
from rich.console import Console

from penzai_shard.axis_rules import AxisRules
from penzai_shard.checkpointing import param_dict, restore_params, save_params
from penzai_shard.checkpointing.locations import absolute_path, refuse_existing
from penzai_shard.cli.corpus import Corpus
from penzai_shard.cli.demo_failure import DemoFailure
from penzai_shard.errors import PlanError
from penzai_shard.fitting import LogRecord, fit
from penzai_shard.layers import ConstrainShardingByName, Jitted
from penzai_shard.meshes import AnyMesh, make_mesh, mesh_text
from penzai_shard.placement import abstract_model, sharded_init
from penzai_shard.planning import ShardingPlan, bytes_text, make_plan
from penzai_shard.processes import on_first_process
from penzai_shard.rule_presets import data_parallel, fully_sharded, tensor_parallel
from penzai_shard.text_tables import printable
from penzai_shard.training import StatefulTrainer, shard_batch

# Rounded up to what both meshes divide.
LEAST_BATCH_SIZE = 16
CONTEXT = 64
DECODER_BLOCKS = 2
SAMPLE_LENGTH = 160
PARAMETERS_FOLDER = "parameters"
RECORDS = ("plan.json", "training.json", "sample.txt")
SIMULATED_DEVICES = 8

Model = Callable[[pz.nx.NamedArray], pz.nx.NamedArray]


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Two meshes over the same devices, and the rules used on each."""

    train_shape: dict[str, int]
    restore_shape: dict[str, int]
    train_rules: AxisRules
    restore_rules: AxisRules

    @property
    def batch_size(self) -> int:
        """The batch size: at least what it should be, and divisible on both meshes."""
        parts = math.lcm(self.train_shape["data"], self.restore_shape["data"])
        return -(-LEAST_BATCH_SIZE // parts) * parts

    @classmethod
    def for_shape(cls, shape: dict[str, int]) -> "Layouts":
        """FSDP and tensor parallelism to train; other sizes and other rules to restore. A mesh axis
        that is left out has size 1."""
        if not set(shape) <= {"data", "model"}:
            raise DemoFailure(
                f"the demo's mesh has the mesh axes data and model, not {', '.join(shape)}: "
                "write for instance --mesh data=4,model=2."
            )
        shape = {"data": 1, "model": 1} | shape
        return cls(
            train_shape=shape,
            restore_shape={"data": shape["model"], "model": shape["data"]},
            train_rules=data_parallel() | tensor_parallel() | fully_sharded(min_size=1024),
            # What does not divide over the other mesh stays whole on it.
            restore_rules=AxisRules(
                [
                    ("batch", "data"),
                    ("embedding", "model"),
                    ("embedding", None),
                    ("neurons", "data"),
                    ("neurons", None),
                ]
            ),
        )


def run_demo(
    *,
    steps: int,
    shape: dict[str, int] | None,
    out: Path,
    seed: int,
    simulated: int | None = None,
) -> None:
    """Runs the demo and prints what it does.

    Args:
        steps: Number of training steps.
        shape: Sizes of the mesh axes ``data`` and ``model``; chosen by the number of devices if
            None.
        out: Folder to write to; made if needed.
        seed: Seed of the initialisation, the batches and the sampling.
        simulated: How many devices to simulate on the CPU; if None, the accelerators are used,
            and eight simulated devices on a machine without any.

    Raises:
        DemoFailure: The options do not fit together, or a step failed, or did not give what it
            promises.
        ShardingError: The mesh cannot be made or the model cannot be laid out on it.
    """
    if steps < 1:
        raise DemoFailure(f"--steps must be at least 1, not {steps}.")
    layouts = None if shape is None else Layouts.for_shape(shape)
    _prepare_folder(out)
    devices = _devices(simulated, None if shape is None else math.prod(shape.values()))
    # Of several processes the first one speaks.
    console = Console(quiet=jax.process_index() != 0)
    layouts = layouts or Layouts.for_shape(_shape_for(len(devices)))
    mesh = make_mesh(layouts.train_shape, devices)
    corpus = Corpus.help_pages()

    _headline(console, f"1. Plan on {_mesh_text(layouts.train_shape)}")
    abstract = abstract_model(build_model, seed)
    plan = _plan_to_train(abstract, mesh, layouts.train_rules)
    console.print(plan)
    other_mesh = make_mesh(layouts.restore_shape, devices)
    other_rules = layouts.restore_rules
    # Refused here, if at all, and not after the training.
    make_plan(abstract, other_mesh, other_rules, on_unnamed="replicate")

    _headline(console, "2. Initialise, each device its own part")
    start = time.perf_counter()
    bare = sharded_init(build_model, seed, plan=plan)
    parameters = jax.block_until_ready(jax.tree.leaves(param_dict(bare)))
    count = sum(array.size for array in parameters)
    console.print(f"{count:,} parameters in {time.perf_counter() - start:.1f} s")

    _headline(console, "3. Edit: constrain after each block, jit the whole")
    edited, edits = with_constraints(bare, mesh)
    console.print(f"{edits} constraints inserted, by selecting TransformerBlock")

    _headline(console, f"4. Train on Python's help pages ({len(corpus.training):,} bytes)")
    trained, history = _train(console, Jitted(edited), corpus, mesh, layouts, steps, seed)

    _headline(console, "5. Save")
    save_params(out / PARAMETERS_FOLDER, trained, overwrite=True)
    held = sum(f.stat().st_size for f in (out / PARAMETERS_FOLDER).rglob("*") if f.is_file())
    console.print(f"{bytes_text(held)} in {out / PARAMETERS_FOLDER}")

    _headline(console, f"6. Restore onto {_mesh_text(layouts.restore_shape)} under other rules")
    restored_bare = restore_params(out / PARAMETERS_FOLDER, abstract, other_mesh, other_rules)
    restored = Jitted(with_constraints(restored_bare, other_mesh)[0])
    console.print(str(other_rules))

    _headline(console, "7. Compare")
    agreement = _compare(
        console,
        corpus.held_out_batch(layouts.batch_size, CONTEXT + 1),
        (trained, mesh),
        (restored, other_mesh),
    )

    _headline(console, "8. Sample from the restored model")
    line = _sample(restored, corpus, other_mesh, seed)
    console.print(printable(line), markup=False, highlight=False)

    _headline(console, "Files")
    for path in _write_records(out, plan, history, agreement, line):
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def _plan_to_train(abstract: Any, mesh: jax.sharding.Mesh, rules: AxisRules) -> ShardingPlan:
    """The plan, or which meshes of as many devices have one."""

    def plan_on(mesh: AnyMesh) -> ShardingPlan:
        return make_plan(abstract, mesh, rules, on_unnamed="replicate")

    try:
        return plan_on(mesh)
    except PlanError as error:
        fitting = []
        for model in (m for m in range(1, mesh.size + 1) if mesh.size % m == 0):
            with contextlib.suppress(PlanError):
                plan_on(AbstractMesh((mesh.size // model, model), ("data", "model")))
                fitting.append(f"--mesh data={mesh.size // model},model={model}")
        raise DemoFailure(
            f"the demo's model does not fit {_mesh_text(dict(mesh.shape))}: {error.problems[0]} "
            f"Give {' or '.join(fitting)}."
        ) from error


def build_model(seed: int) -> Any:
    """A byte-level transformer of the Llama family, small enough for two cores."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=8,
        query_head_multiplier=1,
        embedding_dim=128,
        projection_dim=16,
        mlp_hidden_dim=384,
        num_decoder_blocks=DECODER_BLOCKS,
        vocab_size=256,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    return llamalike_common.build_llamalike_transformer(
        config, init_base_rng=jax.random.key(seed), name="transformer"
    )


def with_constraints(model: Any, mesh: jax.sharding.Mesh) -> tuple[Any, int]:
    """Pins the batch of what leaves each block; gives the model and the number of edits."""
    blocks = pz.select(model).at_instances_of(TransformerBlock)
    return blocks.insert_after(ConstrainShardingByName(mesh, data_parallel())), blocks.count()


def next_byte_loss(model: Model, rng: Any, state: Any, tokens: pz.nx.NamedArray) -> Any:
    """Mean cross-entropy of each byte given those before it, in nats."""
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    log_probs = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocabulary")).tag("vocabulary")
    right = log_probs[{"vocabulary": tokens[{"seq": pz.slice[1:]}]}]
    loss = -right.untag("batch", "seq").unwrap().mean()
    return loss, state, {"loss": loss}


def _train(
    console: Console,
    model: Any,
    corpus: Corpus,
    mesh: jax.sharding.Mesh,
    layouts: Layouts,
    steps: int,
    seed: int,
) -> tuple[Any, list[float]]:
    """Trains, and gives the trained model and the loss of every step, in nats per byte."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, max(1, steps // 10), steps + 1)
    trainer = StatefulTrainer.build(
        root_rng=jax.random.key(seed),
        model=model,
        optimizer_def=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)),
        loss_fn=next_byte_loss,
        mesh=mesh,
        rules=layouts.train_rules,
    )
    records: list[LogRecord] = []
    pieces = corpus.batches(seed, layouts.batch_size, CONTEXT + 1)
    trainer.state = fit(
        trainer.state,
        trainer.step_fn,
        ({"tokens": tokens} for tokens in pieces),
        steps=steps,
        mesh=mesh,
        rules=layouts.train_rules,
        log_every=1,
        on_log=records.append,
        progress=console,
    )
    history = [record.loss for record in records if record.loss is not None]
    first = records[0].seconds_per_step
    entropy = corpus.unigram_entropy()
    last = float(np.mean(history[-10:]))
    console.print(
        f"first step with compilation {first:.1f} s; loss {history[0]:.3f} -> {last:.3f} nats per "
        f"byte (mean of the last {len(history[-10:])}); a model without context reaches "
        f"{entropy:.3f}"
    )
    if steps >= 100 and last > entropy - 0.3:
        raise DemoFailure(
            f"the loss {last:.3f} is not clearly below the unigram entropy {entropy:.3f}."
        )
    return trainer.model, history


def _compare(
    console: Console,
    held_out: pz.nx.NamedArray,
    trained: tuple[Any, jax.sharding.Mesh],
    restored: tuple[Any, jax.sharding.Mesh],
) -> dict[str, float]:
    losses = []
    for model, mesh in (trained, restored):
        tokens = shard_batch(held_out, mesh, data_parallel())
        losses.append(float(next_byte_loss(model, None, None, tokens)[0]))
    before, after = param_dict(trained[0]), param_dict(restored[0])
    if before.keys() != after.keys():
        raise DemoFailure(f"parameters differ in name: {sorted(before.keys() ^ after.keys())}.")
    largest = max(
        float(_largest_difference(one.data_array, after[name].data_array))
        for name, one in before.items()
    )
    apart = abs(losses[0] - losses[1])
    console.print(f"parameters: largest difference {largest} over {len(before)} arrays")
    console.print(
        f"held-out loss: {losses[0]:.6f} trained, {losses[1]:.6f} restored, difference {apart:.1e}"
    )
    if largest != 0.0 or apart > 1e-4:
        raise DemoFailure(
            f"the restored model differs: parameters by {largest}, loss by {apart:.1e}."
        )
    return {"parameter_difference": largest, "trained_loss": losses[0], "restored_loss": losses[1]}


@jax.jit
def _largest(one: jax.Array, other: jax.Array) -> jax.Array:
    return jax.numpy.abs(one - other).max()


def _largest_difference(one: jax.Array, other: jax.Array) -> jax.Array:
    """On the devices, as no process may have all of an array; they are in another order in one."""
    return _largest(one, jax.device_put(other, one.sharding))


def _sample(model: Any, corpus: Corpus, mesh: jax.sharding.Mesh, seed: int) -> str:
    text = list(corpus.prompt(CONTEXT))
    random = np.random.default_rng(seed)
    rows = mesh.shape["data"]
    for _ in range(SAMPLE_LENGTH):
        window = np.asarray(text[-CONTEXT:], np.int32)
        tokens = pz.nx.wrap(np.tile(window, (rows, 1)), "batch", "seq")
        logits = model(shard_batch(tokens, mesh, data_parallel()))
        # Whole on every device, so that each process can read it.
        row = logits[{"batch": 0, "seq": -1}].unwrap("vocabulary")
        last = np.asarray(jax.device_put(row, NamedSharding(mesh, PartitionSpec())), np.float64)
        chances = np.exp((last - last.max()) / 0.7)
        text.append(int(random.choice(256, p=chances / chances.sum())))
    return " ".join(bytes(text[CONTEXT - len("The ") :]).decode("utf-8", "replace").split())


def _write_records(
    out: Path,
    plan: ShardingPlan,
    history: list[float],
    agreement: dict[str, float],
    line: str,
) -> list[Path]:
    losses = json.dumps({"loss": history, **agreement}, indent=2)

    def write() -> None:
        for name, text in zip(RECORDS, (plan.to_json(), losses, line), strict=True):
            (out / name).write_text(text + "\n", encoding="utf-8")

    on_first_process("writing the records", write)
    return [out / name for name in (PARAMETERS_FOLDER, *RECORDS)]


def _prepare_folder(out: Path) -> None:
    """Makes the folder, and finds out whether all can be written there, before any work is done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise DemoFailure(
            f"--out {out}: cannot write there ({error.strerror}). Give another folder."
        ) from error
    for name in RECORDS:
        if (out / name).is_dir():
            raise DemoFailure(f"--out {out}: {name} is a folder there. Give another folder.")
    refuse_existing(absolute_path(out / PARAMETERS_FOLDER), overwrite=True)


def _devices(simulated: int | None, wanted: int | None) -> list[jax.Device]:
    """The devices to use: those asked for, else all accelerators, else eight simulated ones.

    Args:
        simulated: How many devices to simulate, if that was asked for.
        wanted: How many the mesh needs; by default all.
    """
    if simulated is not None and simulated < 1:
        raise DemoFailure(f"--simulate-devices must be at least 1, not {simulated}.")
    if simulated is not None or "xla_force_host_platform_device_count" not in os.environ.get(
        "XLA_FLAGS", ""
    ):
        # Takes effect if nothing has asked for devices yet; accelerators stay the default.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", simulated or SIMULATED_DEVICES)
    devices = jax.devices() if simulated is None else jax.devices("cpu")
    if simulated is not None and len(devices) < simulated:
        raise DemoFailure(
            f"--simulate-devices {simulated}: JAX has started with {len(devices)} CPU devices, "
            "and cannot make more. Unset XLA_FLAGS, or ask in a new process."
        )
    devices = devices[:simulated]
    wanted = len(devices) if wanted is None else wanted
    if wanted > len(devices):
        raise DemoFailure(
            f"--mesh needs {wanted} devices, and there are {len(devices)}. Give a smaller mesh, or "
            f"simulate them on the CPU: --simulate-devices {wanted}."
        )
    if jax.process_count() > 1 and wanted < jax.device_count():
        raise DemoFailure(
            f"--mesh needs {wanted} devices, and the {jax.process_count()} processes have "
            f"{jax.device_count()}. Give a mesh of all of them."
        )
    return devices[:wanted]


def _shape_for(devices: int) -> dict[str, int]:
    model = 2 if devices % 2 == 0 else 1
    return {"data": devices // model, "model": model}


def _mesh_text(shape: dict[str, int]) -> str:
    return f"mesh ({mesh_text(shape)})"


def _headline(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]", highlight=False)
