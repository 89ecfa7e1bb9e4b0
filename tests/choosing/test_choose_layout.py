"""``choose_layout``: what is picked and said by given costs, then steps from end to end."""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.choosing import choose as choosing
from penzai_shard.choosing.cost import StepCost
from penzai_shard.choosing.hardware import Hardware
from penzai_shard.errors import (
    CompilationError,
    NothingFitsError,
    PlanError,
    Problem,
    PropagationError,
)
from tests.choosing.models import LIBRARIES, TOKENS, build_layers, square_loss
from tests.layouts.transformers import build_llama
from tests.refusals import problem_paths, problems_of

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
    sent = {("gradient", ("data",)): 1e9 * data / model} if data > 1 else {}
    sent |= {("parameter", ("data",)): 2e9} if is_split else {}
    sent |= {("activation", ("model",)): 1e9 * model} if model > 1 else {}
    flops = 4e12 * (1.3 if layout.rematerialise == "nothing" else 1.0)
    return StepCost(flops, sent, memory)


@dataclasses.dataclass
class Fakes:
    """Prices that are given, and which layouts were compiled."""

    exact: object = cost
    estimate: object = cost
    bound: object = lambda *_: 1e-9
    blocks: int = 1
    compiled: list = dataclasses.field(default_factory=list)
    interrupt_at: int = 10**9

    def price(self, candidate):
        return self.estimate(candidate)

    def compile(self, workload, some):
        if len(self.compiled) >= self.interrupt_at:
            raise KeyboardInterrupt
        self.compiled.extend(some)
        return [self.exact(candidate) for candidate in some]


@pytest.fixture
def fakes(monkeypatch):
    made = Fakes()
    monkeypatch.setattr(choosing, "Prices", lambda workload: made)
    monkeypatch.setattr(choosing, "compile_candidates", made.compile)
    monkeypatch.setattr(choosing, "bound", lambda *given: made.bound(*given))
    return made


X = {"x": pz.nx.ones({"batch": 64, "embedding": 64})}


def choose(loss_fn=square_loss, **options):
    given = {"devices": "v5e:8", "batch": X, "memory": "16GiB", "progress": False} | options
    return pzs.choose_layout(pzs.abstract_model(build_layers), loss_fn, optax.adam(1e-3), **given)


def all_layouts(**options):
    """Every candidate, for an exhaustive search."""
    workload = choosing.read_workload(
        pzs.abstract_model(build_layers), square_loss, optax.adam(1e-3), X
    )
    meshes = choosing.mesh_shapes(Hardware.read("v5e:8"))
    return choosing.make_candidates(workload, meshes, **options)


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


def test_choose_layout_looks_at_a_mesh_whose_first_table_is_slow(fakes):
    def slow_first(candidate):
        found = cost(candidate)
        is_quick = dict(candidate.mesh_sizes) == {"data": 8}
        is_first = "embedding" in str(candidate.layout.parameters)
        factor = (100 if is_first else 0.1) if is_quick else 1
        return dataclasses.replace(found, flops=found.flops * factor, sent={})

    fakes.exact = fakes.estimate = slow_first
    fakes.bound = lambda workload, candidate, hardware: (
        1e-9 if "embedding" in str(candidate.layout.parameters) else 1e-6
    )
    best = choose().best
    assert best.mesh_sizes == {"data": 8}
    assert "embedding" not in str(best.layout.parameters)


def test_choose_layout_ranks_equal_times_by_what_is_simpler(fakes):
    fakes.exact = fakes.estimate = lambda candidate: StepCost(1e12, {}, cost(candidate).memory)
    best = choose().best
    assert (best.microbatches, best.layout.rematerialise) == (1, None)


def test_choose_layout_says_what_each_pays_more_for(fakes):
    found = choose(memory="4GiB")
    assert not found.best.pays(found.best)
    slower = next(each for each in found if each.seconds > 1.1 * found.best.seconds)
    assert slower.pays(found.best)[0][1] > 0
    # The oracle: what it sends of parameters, divided by what a link of a v5e carries.
    with_gathers = next(x for x in found if x.layout.parameters != found.best.layout.parameters)
    paid = dict(with_gathers.pays(found.best))["gathering parameters over data"]
    link = with_gathers.hardware.bandwidths(with_gathers.mesh_sizes)["data"]
    assert paid == pytest.approx(2e9 / link)


@pytest.mark.parametrize(("bound", "gap"), [(0.9, 0.1 / 0.9), (0.5, 1.0), (2.0, 0.0)])
def test_gap_is_the_pick_against_the_least_bound_of_what_was_not_compiled(fakes, bound, gap):
    best = choose(memory="4GiB").best.seconds
    fakes.bound = lambda workload, candidate, hardware: bound * best
    found = choose(memory="4GiB")
    assert found.gap == pytest.approx(gap)
    assert f"At most {math.ceil(100 * gap)} % slower" in " ".join(str(found).split())


@pytest.mark.parametrize(
    ("options", "is_closed"),
    # With all policies and microbatches a table has twelve layouts.
    [({"rematerialise": (None,), "microbatches": (1,)}, True), ({}, False)],
)
def test_what_may_be_quicker_is_compiled_if_it_is_little(fakes, options, is_closed):
    slow = {each.table for each in all_layouts(**options) if "largest" in each.words}
    best = choose(**options).best.seconds
    fakes.bound = lambda workload, each, hardware: best * (0.5 if each.table in slow else 1.0)
    fakes.compiled.clear()
    found = choose(**options)
    assert found.gap == pytest.approx(0.0 if is_closed else 1.0)
    compiled = {each.table for each in fakes.compiled}
    assert (slow <= compiled) is is_closed
    assert len(fakes.compiled) <= 36


@pytest.mark.parametrize(
    ("prices", "error"),
    [
        ("estimate", PlanError("cannot be laid out:", [Problem("", "1 is not 2", "")])),
        ("exact", CompilationError("1 is not 2")),
    ],
)
def test_choose_layout_goes_on_without_what_is_refused(fakes, prices, error):
    def refuse(candidate, part="embedding"):
        if part not in candidate.words:
            return cost(candidate)
        if prices == "exact":
            return error
        raise error

    assert any("embedding" in each.candidate.words for each in choose())
    setattr(fakes, prices, refuse)
    fakes.compiled.clear()
    found = choose()
    assert found.choices
    # What is refused is not compiled again.
    assert len({*fakes.compiled}) == len(fakes.compiled)
    shown = found.priced if prices == "estimate" else found
    assert not any("embedding" in each.candidate.words for each in shown)
    assert any("1 is not 2" in note for note in found.notes)
    setattr(fakes, prices, functools.partial(refuse, part=""))
    assert any("1 is not 2" in problem.what for problem in problems_of(type(error), choose))


@pytest.mark.parametrize(
    ("memory", "flops", "note"),
    [("2GiB", 1, "Memory limits: with"), ("16GiB", 1, "Sending over"), ("16GiB", 99, "Computing")],
)
def test_choices_say_what_would_change_the_answer(fakes, memory, flops, note):
    def priced(candidate):
        return dataclasses.replace(cost(candidate), flops=flops * cost(candidate).flops)

    fakes.exact = fakes.estimate = priced
    found = choose(memory=memory)
    assert note in " ".join(str(found).split())
    if memory == "2GiB":
        assert any(
            each.seconds < found.best.seconds and each.memory_bytes > found.memory_limit
            for each in found.priced
        )


def test_choose_layout_where_nothing_fits_says_what_would_help(fakes):
    (problem,) = problems_of(NothingFitsError, choose, memory="700MiB")
    assert "of optimizer" in problem.what
    devices = problem.fix.split("'")[1]
    assert choose(memory="700MiB", devices=devices).best.memory_bytes <= 700 * 2**20


def test_what_nothing_bounds_has_no_certificate(fakes):
    fakes.bound = lambda *_: 0.0
    found = choose()
    assert found.gap == math.inf
    assert "% slower" not in str(found)
    nothing = dict.fromkeys(("parameters", "optimizer", "inputs", "activations"), 0.0)
    fakes.exact = fakes.estimate = lambda candidate: StepCost(0.0, {}, nothing)
    assert "limits the step" in str(choose())


def test_choose_layout_gives_the_best_so_far_after_an_interruption(fakes):
    fakes.interrupt_at = 4
    found = choose()
    assert found.interrupted
    assert len(fakes.compiled) == 4
    assert "interrupted" in str(found).splitlines()[0]
    # Nothing fits as yet.
    fakes.compiled.clear()
    fakes.interrupt_at = 0
    with pytest.raises(KeyboardInterrupt):
        choose()


def test_choose_layout_leaves_memory_free_where_one_and_two_blocks_were_compiled(fakes):
    fakes.blocks = 80
    found = choose(memory="4GiB")
    assert found.best.priced_by == "compiled (1 and 2 of 80 blocks)"
    assert all(each.memory_bytes <= 0.88 * 4 * GIB for each in found)
    held = {"parameters": 9 * GIB, "optimizer": 1.0, "inputs": 1.0, "activations": 1.0}
    fakes.exact = fakes.estimate = lambda candidate: StepCost(1e12, {}, held)
    (problem,) = problems_of(NothingFitsError, choose, memory="10GiB")
    assert "12 % stay free" in problem.what


def test_choose_layout_gives_the_same_answer_in_any_order(fakes, monkeypatch):
    first = choose(memory="4GiB")
    given = choosing.make_candidates

    def turned_around(*args, **options):
        found = given(*args, **options)
        return type(found)(found[::-1], found.left_out)

    monkeypatch.setattr(choosing, "make_candidates", turned_around)
    assert str(choose(memory="4GiB")) == str(first)


def test_choose_layout_without_a_sane_layout_says_why(fakes):
    odd = {"x": pz.nx.ones({"batch": 63, "embedding": 64})}
    mesh = pzs.make_mesh({"data": 8}, abstract=True)
    given = {"batch": odd, "devices": mesh, "hardware": "v5e"}
    assert any("63" in problem.what for problem in problems_of(PlanError, choose, **given))


def test_choose_layout_refuses_a_loss_with_a_mesh_of_its_own():
    own = jax.sharding.NamedSharding(pzs.make_mesh({"data": 2}, jax.devices()[:2]), jax.P("data"))

    def pinned(model, rng, state, x):
        y = model(x).untag("batch", "embedding").unwrap()
        return (jax.lax.with_sharding_constraint(y, own) ** 2).mean(), state, {}

    assert problem_paths(PropagationError, choose, loss_fn=pinned, devices="v5e:4") == ["loss_fn"]


# From end to end

PENZAI = functools.partial(build_llama, vocabulary=64), lambda model, x: model(x), False


@pytest.mark.parametrize("library", ["penzai", *LIBRARIES])
def test_the_pick_trains_as_one_device_does(library):
    build, apply, plain_arrays = (LIBRARIES | {"penzai": PENZAI})[library]
    batch, first = {"tokens": TOKENS, "targets": TOKENS * 3 % 64}, {"first_axis": "batch"}
    if library == "penzai":
        batch, first = {name: pz.nx.wrap(x, "batch", "seq") for name, x in batch.items()}, {}

    def loss_fn(model, rng, state, tokens, targets):
        loss = pzs.cross_entropy(apply(model, tokens), targets)
        return loss, state, {"loss": loss}

    def train(layout, mesh, build_step):
        state, step = build_step(
            build, mesh=mesh, loss_fn=loss_fn, optimizer=optax.adam(1e-2), rng=jax.random.key(1)
        )
        inputs, losses = layout.shard_batch(batch, mesh, **first), []
        for _ in range(3):
            state, aux = step(state, **inputs)
            losses.append(float(aux["loss"]))
        return losses

    found = pzs.choose_layout(
        *(pzs.abstract_model(build), loss_fn, optax.adam(1e-2)),
        devices=pzs.make_mesh({"data": 4, "model": 2}),
        memory="1GiB",
        hardware="cpu",
        batch=16,
        seq=8,
        keep={"neurons": "model", "vocabulary": None, "embedding": "data", "seq": None},
        rematerialise=(None,),
        microbatches=(2,),
        plain_arrays=plain_arrays,
        compiled=1,
        progress=False,
    )
    losses = train(found.best.layout, found.best.mesh(), found.best.build)
    assert losses[-1] < losses[0]
    one, whole = pzs.make_mesh({"data": 1}, jax.devices()[:1]), pzs.Layout.data_parallel()
    options = {"plain_arrays": True} if plain_arrays else {}
    alone = train(whole, one, functools.partial(whole.build, **options))
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
