"""The search among candidates: what is priced closely, what is picked, what is said of it."""

import io
import itertools
import json

import jax
import matplotlib.pyplot as plt
import optax
import pytest
from rich.console import Console

import penzai_shard as pzs
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.asked_devices import read_devices
from penzai_shard.choosing.choices.asked_problem import read_problem
from penzai_shard.choosing.choices.choices import MOST_CHOICES
from penzai_shard.choosing.choices.choose import searched
from penzai_shard.choosing.step_costs import Sent, StepCost
from penzai_shard.errors import NothingFitsError, PlanError

GIB = 2**30
MOST = {"propagation": 8, "compiled": 4}


def candidates():
    """Thirty-six layouts of eight devices."""
    sizes = [(("data", 8),), (("data", 4), ("model", 2)), (("data", 2), ("model", 4))]
    tables = [{}, {"embedding": "data"}, {"neurons": "data"}, {"embedding": "data", "mlp": "data"}]
    return [
        Candidate(mesh, pzs.Layout(parameters=table, compute={"batch": "data"}), parts)
        for mesh, table, parts in itertools.product(sizes, tables, (1, 2, 4))
    ]


def cost(candidate, memory_factor=1.0, traffic_factor=1.0):
    """Splitting more parameters and in more parts holds less and sends more."""
    names = [str(name) for name in candidate.layout.parameters.logical_axes]
    gathered = tuple(
        Sent("parameter", f"lm/block_*/{name}", (name, "x"), ("data",), traffic_factor * 1e10)
        for name in names
    )
    held = {
        "parameters": memory_factor * GIB * (4 - len(names)),
        "activations": memory_factor * GIB * 2 / candidate.microbatches,
    }
    flops = 1e12 * (1 + 0.1 * candidate.microbatches) * dict(candidate.mesh_axes)["data"]
    return StepCost(flops, gathered, held)


class FakeStage:
    """A stage whose prices are given by a function, and which remembers what it priced."""

    def __init__(self, name, price=cost):
        self.name, self.price = name, price
        self.seen = []

    def costs(self, some):
        for one in some:
            self.seen.append(one)
            yield self.price(one)

    def close(self):
        self.is_closed = True


@pytest.fixture(scope="module")
def problem():
    model = pzs.name_axes({"w": jax.ShapeDtypeStruct((4, 4), "float32")}, {"w": ("a", "b")})

    def loss_fn(model, rng, state, tokens):
        return 0.0, state, {}

    return read_problem(model, loss_fn, optax.sgd(1.0), 8, 16, False)


def choose(problem, *stages, memory="16GiB", among=None, **options):
    devices = read_devices("v5e:8", None, memory)
    stages = stages or [FakeStage(name) for name in ("names", "propagation", "compiled")]
    among = candidates() if among is None else among
    return searched(problem, devices, among, stages, most=MOST, progress=False, **options)


def test_all_are_priced_by_names_and_the_best_more_and_more_exactly(problem):
    stages = [FakeStage(name) for name in ("names", "propagation", "compiled")]
    choices = choose(problem, *stages)
    assert [len(stage.seen) for stage in stages] == [36, 8, 4]
    assert set(stages[2].seen) <= set(stages[1].seen)
    assert len(choices) == 4
    assert {choice.priced_by for choice in choices} == {"compiled"}
    ranked = [choice.priced.rank for choice in choices]
    assert ranked == sorted(ranked)
    best = choices.best
    assert (best.mesh_shape, best.microbatches) == ({"data": 2, "model": 4}, 1)
    assert not best.layout.parameters.logical_axes
    assert len(choices.priced) == 36
    assert choices[0] is best
    assert [*choices][:2] == [*choices[:2]]


def test_the_order_in_which_candidates_and_rules_are_given_counts_for_nothing(problem):
    first = choose(problem)
    again = [
        Candidate(
            one.mesh_axes,
            pzs.Layout(
                parameters=dict(reversed(pairs(one.layout.parameters))),
                compute={"batch": "data"},
            ),
            one.microbatches,
        )
        for one in reversed(candidates())
    ]
    assert str(choose(problem, among=again)) == str(first)


def pairs(rules):
    return [(rule.logical_axis, rule.mesh_axes[0]) for rule in rules.rules]


@pytest.mark.parametrize("stage", ["names", "propagation", "compiled"])
def test_what_is_over_the_memory_is_never_picked_however_the_estimates_err(problem, stage):
    for factor in (0.7, 1.0, 1.2):
        stages = [FakeStage(name) for name in ("names", "propagation", "compiled")]
        for one in stages[: ("names", "propagation", "compiled").index(stage)]:
            one.price = lambda candidate: cost(candidate, memory_factor=factor)  # noqa: B023
        for memory in (2.6, 3.1, 4.1, 5.5):
            choices = choose(problem, *stages, memory=int(memory * GIB))
            assert all(choice.memory_bytes <= memory * GIB for choice in choices)
            for one in stages:
                one.seen.clear()


@pytest.mark.parametrize("factor", [0.5, 1.6])
def test_what_was_compiled_says_which_others_fit(problem, factor):
    """The estimates of memory are wrong by one factor for all."""
    stages = [
        FakeStage("names"),
        FakeStage("propagation"),
        FakeStage("compiled", lambda one: cost(one, memory_factor=factor)),
    ]
    limit = int(5.1 * GIB)
    choices = choose(problem, *stages, memory=limit)
    fitting = [
        (one.time.bound, one.memory)
        for one in choices.found.priced["propagation"]
        if one.memory * factor <= limit
    ]
    assert choices.best.seconds == min(fitting)[0]
    assert len(stages[2].seen) <= 2 * MOST["compiled"]
    assert all(stage.is_closed for stage in stages)


def test_if_nothing_that_was_compiled_fits_no_estimate_takes_its_place(problem):
    stages = [
        FakeStage("names"),
        FakeStage("propagation"),
        FakeStage("compiled", lambda one: cost(one, memory_factor=10.0)),
    ]
    with pytest.raises(NothingFitsError, match=r"fits into 12\.0 GiB"):
        choose(problem, *stages, memory="12GiB")
    assert len(stages[2].seen) == len(set(stages[2].seen)) == len(stages[1].seen)
    stages[2] = Interrupted("compiled", 2, lambda one: cost(one, memory_factor=10.0))
    choices = choose(problem, *stages, memory="12GiB")
    assert choices.best.priced_by == "propagation"
    compiled = {one.candidate for one in choices.found.priced["compiled"]}
    assert compiled.isdisjoint(choice.priced.candidate for choice in choices)


def test_nothing_that_fits_is_an_error_with_the_nearest_and_what_would_help(problem):
    with pytest.raises(NothingFitsError) as caught:
        choose(problem, memory="1.5GiB", restricted_by=["keep={'batch': 'data'}"])
    text = " ".join(str(caught.value).split())
    assert "none of 36 layouts fits into 1.5 GiB of memory on each device" in text
    assert "The nearest needs 2.5 GiB, which is 1.0 GiB too much" in text
    assert "(parameters 2.0 GiB, activations 512.0 MiB)" in text
    assert "4 microbatches: parameters: embedding, mlp over data" in text
    assert "more devices: 16 or more" in text
    assert "parameters in bfloat16" in text
    assert "leave out keep={'batch': 'data'}" in text
    with pytest.raises(NothingFitsError, match="a smaller batch: about 4 in place of 8"):
        choose(problem, memory="2.3GiB")


def test_no_candidates_at_all_is_an_error(problem):
    with pytest.raises(PlanError, match=r"no sane layout for batch 8 x seq 16 on 8 devices"):
        choose(problem, among=[])


class Interrupted(FakeStage):
    """A stage that the user ends after so many prices."""

    def __init__(self, name, after, price=cost):
        super().__init__(name, price)
        self.after = after

    def costs(self, some):
        for one in super().costs(some):
            if len(self.seen) > self.after:
                raise KeyboardInterrupt
            yield one


@pytest.mark.parametrize(
    ("stages", "count", "by"),
    [
        ([Interrupted("names", 5)], 5, "names"),
        ([FakeStage("names"), Interrupted("propagation", 0)], 36, "names"),
        ([FakeStage("names"), Interrupted("propagation", 3)], 3, "propagation"),
        (
            [FakeStage("names"), FakeStage("propagation"), Interrupted("compiled", 2)],
            2,
            "compiled",
        ),
    ],
)
def test_an_interrupted_search_gives_the_best_so_far_and_says_so(problem, stages, count, by):
    choices = choose(problem, *stages)
    assert choices.interrupted
    assert len(choices) == min(count, MOST_CHOICES)
    assert choices.best.priced_by == by
    assert str(choices).startswith("the best so far, after an interruption of ")
    assert "Interrupted: later stages" in str(choices)
    assert json.loads(choices.to_json())["interrupted"] is True
    assert "when the search was interrupted" in choices.best.to_toml()


def test_an_interruption_before_any_price_is_one(problem):
    with pytest.raises(KeyboardInterrupt):
        choose(problem, Interrupted("names", 0))


def test_a_candidate_that_cannot_be_laid_out_is_left_out_and_reported(problem):
    def price(candidate):
        if candidate.mesh_shape == {"data": 2, "model": 4}:
            return PlanError("w: logical axis 'a' (6) does not divide.")
        return cost(candidate)

    stages = [FakeStage(name, price) for name in ("names", "propagation", "compiled")]
    choices = choose(problem, *stages)
    assert choices.best.mesh_shape == {"data": 4, "model": 2}
    text = " ".join(str(choices).split())
    assert "12 layouts cannot be built, and are left out. data=2, model=4: w: logical axis" in text
    with pytest.raises(PlanError, match=r"none of the layouts for .* can be laid out"):
        choose(problem, FakeStage("names", lambda one: PlanError("no.")))


def test_it_says_what_the_others_pay_more_for_and_where(problem):
    among = [one for one in candidates() if len(one.mesh_axes) == 1 and one.microbatches == 1]
    choices = choose(problem, among=among)
    assert choices.best.pays_words() == "It pays most for 44.7 ms computing"
    paying = next(one for one in choices if "embedding" in one.layout.parameters.logical_axes)
    first, *_ = paying.pays
    assert str(first) == (
        "+100.0 ms gathering parameters [embedding, x] of lm/block_*/embedding over 'data'"
    )
    assert first.seconds == pytest.approx(0.1)
    assert paying.memory_words == "-1.0 GiB of parameters"


def test_choices_are_a_table_a_tree_and_json_with_the_same_figures(problem, capsys):
    choices = choose(problem)
    best = choices.best
    text = " ".join(str(choices).split())
    assert text.startswith(
        "the best of 36 layouts for batch 8 x seq 16 on 8 devices (v5e:2x4): data=2, model=4; at "
        "least 11.2 ms in each step, 6.0 GiB of 16.0 GiB on each device"
    )
    assert "1. data=2, model=4: parameters: whole | activations: batch over data" in text
    assert "Priced: 36 by names, 8 by propagation, 4 as compiled; of all, 0 need more" in text
    assert all(len(line) <= 100 for line in str(choices).splitlines())
    found = json.loads(choices.to_json())
    assert found["counts"] == {"names": 36, "propagation": 8, "compiled": 4}
    assert len(found["choices"]) == 4
    assert len(found["priced"]) == 36
    assert found["choices"][0]["seconds"]["bound"] == best.seconds
    assert found["choices"][0]["memory"]["total"] == best.memory_bytes == 6 * GIB
    tree = choices.tree()
    assert text.startswith(tree.verdict)
    assert [node.figure("memory").value for node in tree.children] == [
        choice.memory_bytes for choice in choices
    ]
    assert "<table" in choices._repr_html_()
    Console(width=120).print(choices)
    assert "data=2, model=4" in capsys.readouterr().out


def test_a_choice_is_saved_with_its_reasons_and_read_back(problem, tmp_path):
    choice = choose(problem)[1]
    path = choice.save(tmp_path / "new" / "rules.toml")
    text = path.read_text()
    assert text.startswith(
        "# Number 2 of 36 layouts for batch 8 x seq 16 on 8 devices (v5e:2x4), as choose_layout"
    )
    assert "# A device holds 5.0 GiB: parameters 4.0 GiB, activations 1.0 GiB." in text
    assert "# A step takes at least 12.2 ms: computing 12.2 ms, sending 0.0 us; priced as" in text
    found = pzs.Layout.read_toml(path)
    assert found.layout == pzs.Layout.from_toml(path) == choice.layout
    assert (found.mesh_shape, found.microbatches) == (choice.mesh_shape, choice.microbatches)
    assert dict(choice.mesh(abstract=True).shape) == choice.mesh_shape
    assert dict(choice.mesh().shape) == {"data": 2, "model": 4}
    assert repr(choice).startswith("Choice(data=2, model=4, 2 microbatches: parameters: whole")


def test_all_that_was_priced_is_drawn_with_the_pick(problem):
    figure, axes = plt.subplots()
    assert choose(problem).plot(axes) is axes
    shown = {one.get_label(): one for one in axes.collections}
    assert [*shown] == ["by names", "by propagation", "as compiled", "the pick"]
    assert [len(one.get_offsets()) for one in shown.values()] == [28, 4, 4, 1]
    assert shown["the pick"].get_offsets().tolist() == [[6.0, pytest.approx(0.01117, rel=1e-3)]]
    plt.close(figure)


def test_progress_is_a_bar_for_each_stage(problem):
    console = Console(file=io.StringIO(), force_terminal=True, width=90)
    devices = read_devices("v5e:8", None, None)
    stages = [FakeStage(name) for name in ("names", "propagation", "compiled")]
    searched(problem, devices, candidates(), stages, most=MOST, progress=console)
    shown = console.file.getvalue()
    for label, count in (
        ("pricing by names", "36/36"),
        ("pricing by propagation", "8/8"),
        ("compiling", "4/4"),
    ):
        assert label in shown
        assert count in shown
    assert "layouts" in shown
