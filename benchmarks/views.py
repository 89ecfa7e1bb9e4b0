"""Size and time of views, beside treescope's own view of the same model with all its arrays.

A page is what ``treescope.render_to_html`` gives, or what ``report`` writes. What is asked of each:
less than 1 s and 400 kB for a model of 12 blocks, less than 2 MB for a plan of 96. Times are of
this process, taken in turns, and given as ratios to those of treescope's view; the reading of the
compiled program is in them. Nothing is run but the initialisation of that model.

    python -m benchmarks.views [--quick] [--rounds 5]
"""

import benchmarks.simulated_devices  # noqa: F401, I001 - before JAX

import argparse
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import treescope
from penzai import pz

import penzai_shard as pzs
from benchmarks.contenders import median_ratios
from benchmarks.memory_at_scale import loss_fn
from benchmarks.sharded_init import build_initializer
from penzai_shard.pretrained.published_models import find_published

WHOLE_MODEL = "treescope: the model with its arrays"
LARGE_PLAN = "report() of a 70B plan, 96 blocks"


def contenders(blocks: int) -> dict[str, Callable[[], str]]:
    """Ways to make a page about a model and its training step, by their names.

    Args:
        blocks: How many blocks the model has.
    """
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    layout = pzs.Layout.two_dimensional(min_size=0)
    initializer = build_initializer(blocks, 64, 128, 256)
    model = initializer(jax.random.key(0))
    abstract = pzs.abstract_model(initializer, jax.random.key(0))
    edited = layout.recipe(abstract, mesh).apply(abstract)
    plan = layout.plan(edited, mesh)
    state = pzs.TrainState.initial_state(edited, optax.adamw(1e-3), jax.random.key(0))
    planned = layout.plan(state, mesh).restore_structs()
    tokens = jax.eval_shape(lambda: pz.nx.wrap(jnp.zeros((8, 33), jnp.int32)).tag("batch", "seq"))
    batch = pzs.shard_batch(tokens, mesh, {"batch": "data"})
    program = pzs.compile_step(pzs.build_train_step_fn(loss_fn), planned, tokens=batch)

    def whole_model() -> str:
        visualizer = treescope.ArrayAutovisualizer()
        with treescope.active_autovisualizer.set_scoped(visualizer):
            return treescope.render_to_html(model)

    def page(view: Callable[[], Any]) -> Callable[[], str]:
        return lambda: treescope.render_to_html(view())

    return {
        WHOLE_MODEL: whole_model,
        "plan": page(lambda: plan),
        "plan, nothing folded": page(lambda: plan.tree(collapse=False)),
        # Made anew, since it keeps what it has read.
        "program: memory and traffic": page(lambda: dataclasses.replace(program)),
        "program, nothing folded": page(lambda: program.tree(collapse=False)),
        "memory": page(lambda: pzs.device_memory(program)),
        "collectives": page(lambda: pzs.collectives(program)),
        "report(): all of it": report_of(
            lambda path: pzs.report(abstract, mesh, layout, dataclasses.replace(program), path=path)
        ),
        LARGE_PLAN: report_of(large_plan()),
    }


def report_of(write: Callable[[pathlib.Path], pathlib.Path]) -> Callable[[], str]:
    """A page that goes to a file, as its text."""

    def written() -> str:
        with tempfile.TemporaryDirectory() as folder:
            return write(pathlib.Path(folder) / "report.html").read_text(encoding="utf-8")

    return written


def large_plan() -> Callable[[pathlib.Path], pathlib.Path]:
    """Writes the page of a plan of 70B parameters and more in 96 blocks, without a step."""
    published = find_published("llama-3-70b").with_changes({"num_hidden_layers": 96})
    model = published.model()
    mesh = pzs.make_mesh({"data": 32, "model": 8}, abstract=True)
    layout = pzs.Layout.two_dimensional(vocabulary="model")
    return lambda path: pzs.report(model, mesh, layout, path=path)


def measured(
    ways: Mapping[str, Callable[[], str]], rounds: int
) -> tuple[dict[str, int], dict[str, list[float]]]:
    """The size of each page in bytes, and its times in turns, in seconds."""
    sizes = {name: len(way().encode()) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return sizes, times


def main(argv: list[str] | None = None) -> dict[str, int]:
    """Prints the figures.

    Args:
        argv: Command line arguments; those of the process by default.

    Returns:
        The size of each page, in bytes.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 blocks, one round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    blocks = 2 if options.quick else 12
    sizes, times = measured(contenders(blocks), 1 if options.quick else options.rounds)
    ratios = median_ratios(times, WHOLE_MODEL)
    print(f"{f'{blocks} blocks':38}      size     time  of treescope's")
    for name, size in sizes.items():
        seconds = statistics.median(times[name])
        print(f"{name:38} {size / 1000:6.0f} kB {seconds:6.2f} s {ratios[name]:10.2f}")
    return sizes


if __name__ == "__main__":
    main()
