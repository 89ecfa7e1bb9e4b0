"""``choose_layout``: what is picked and what is said of it, by given costs; then from end to end."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from penzai_shard.choosing import choices as choosing
from penzai_shard.choosing.cost import Sent, StepCost
from penzai_shard.errors import NothingFitsError, PlanError, RuleTypeError

GIB = 2**30


# By given costs


def cost(candidate):
    """Splitting parameters sends more and holds less; so do more microbatches."""
    sizes, layout = dict(candidate.mesh_sizes), candidate.layout
    data, model = sizes.get("data", 1), sizes.get("model", 1)
    is_split = "data" in str(layout.parameters)
    kept = {None: 8.0, "dots": 3.0, "nothing": 1.0}[layout.rematerialise]
    memory = {
        "parameters": 4 * GIB / model / (data if is_split else 1),
        "optimizer": 8 * GIB / model / (data if is_split or layout.optimizer else 1),
        "inputs": GIB / 1024,
        "activations": kept * GIB / data / candidate.microbatches,
    }
    sent = [Sent("gradient", ("a",), ("data",), 1e9 * data / model)] if data > 1 else []
    sent += [Sent("parameter", ("a",), ("data",), 2e9)] if is_split else []
    sent += [Sent("activation", (), ("model",), 1e9 * model)] if model > 1 else []
    flops = 4e12 * (1.3 if layout.rematerialise == "nothing" else 1.0)
    return StepCost(flops, tuple(sent), memory)


@dataclasses.dataclass
class Fakes:
    """Prices that are given, and which layouts were compiled."""

    exact: object = cost
    estimate: object = cost
    bound: object = lambda *_: 1e-9
    blocks: int = 0
    compiled: list = dataclasses.field(default_factory=list)
    wholes: list = dataclasses.field(default_factory=list)
    interrupt_at: int = 10**9

    def price(self, candidate):
        return self.estimate(candidate)

    def compile(self, problem, some, *, whole=False):
        if len(self.compiled) >= self.interrupt_at:
            raise KeyboardInterrupt
        (self.wholes if whole else self.compiled).extend(some)
        return [self.exact(candidate) for candidate in some]


@pytest.fixture
def fakes(monkeypatch):
    made = Fakes()
    cut = dataclasses.make_dataclass("Cut", ["blocks"])
    monkeypatch.setattr(choosing, "Prices", lambda problem: made)
    monkeypatch.setattr(choosing, "compile_candidates", made.compile)
    monkeypatch.setattr(choosing, "bound", lambda *given: made.bound(*given))
    monkeypatch.setattr(
        choosing, "cut_model", lambda problem: cut(made.blocks) if made.blocks else None
    )
    return made


def build_layers():
    axes = {"embedding": 64}, {"neurons": 256}
    up = pz.nn.Linear.from_config("up", jax.random.key(0), *axes)
    return pz.nn.Sequential([up, pz.nn.Linear.from_config("down", jax.random.key(1), *axes[::-1])])


def square(model, rng, state, x):
    return (model(x).untag("batch", "embedding") ** 2).mean().unwrap(), state, {}


X = {"x": pz.nx.ones({"batch": 64, "embedding": 64})}


def choose(**options):
    given = {"devices": "v5e:8", "batch": X, "memory": "16GiB", "progress": False} | options
    return pzs.choose_layout(pzs.abstract_model(build_layers), square, optax.adam(1e-3), **given)


def all_layouts(**options):
    """Every candidate, for an exhaustive search."""
    problem = choosing.read_problem(pzs.abstract_model(build_layers), square, optax.adam(1e-3), X)
    hardware = choosing.read_devices("v5e:8").hardware
    return choosing.make_candidates(problem, choosing.mesh_shapes(hardware), **options)


@pytest.mark.parametrize("memory", ["2GiB", "4GiB", "7GiB", "16GiB"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.4])
def test_choose_layout_picks_the_best_that_fits_however_memory_is_estimated(fakes, memory, factor):
    def estimate(candidate):
        exact = cost(candidate)
        return dataclasses.replace(exact, memory={k: factor * n for k, n in exact.memory.items()})

    fakes.estimate = estimate
    found = choose(memory=memory)
    limit = int(memory[:-3]) * GIB
    assert all(choice.memory_bytes <= limit for choice in found)
    assert {choice.priced_by for choice in found} == {"compiled"}
    assert {choice.candidate for choice in found} <= {*fakes.compiled}
    hardware = found.best.hardware
    fitting = [
        choosing.Choice(each, cost(each), hardware, "").seconds
        for each in all_layouts()
        if cost(each).memory_bytes <= limit
    ]
    assert found.best.seconds <= 1.02 * min(fitting)
