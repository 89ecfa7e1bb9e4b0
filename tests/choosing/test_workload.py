"""The step that ``choose_layout`` is asked about: models of all libraries, inputs, mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from penzai import pz

import penzai_shard as pzs
from penzai_shard.arrays.inputs import make_struct
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.workload import read_options, read_workload
from penzai_shard.errors import Problems, RuleTypeError
from tests.choosing.models import LIBRARIES, build_dict, make_weights
from tests.models import penzai_mlp
from tests.refusals import problem_paths, problems_of, refused


def mlp_loss(model, rng, state, x):
    y = model(x)
    return jnp.mean(y.unwrap(*y.named_axes)), state, {}


def token_loss(model, rng, state, tokens, targets, *, weight=1.0):
    return jnp.float32(0), state, {}


def read(model=None, loss_fn=mlp_loss, optimizer=None, batch=None, **options):
    batch = {"x": pz.nx.ones({"batch": 8, "features": 8})} if batch is None else batch
    optimizer = optimizer or optax.adam(1e-3)
    return read_workload(model or penzai_mlp(), loss_fn, optimizer, batch, **options)


# What is read


@pytest.mark.parametrize("is_abstract", [False, True])
def test_read_workload_keeps_no_array_of_a_model(is_abstract):
    workload = read(pzs.abstract_model(penzai_mlp) if is_abstract else penzai_mlp())
    leaves = leaves_of([workload.model, workload.inputs])
    assert {leaf.shape for leaf in leaves if leaf.shape} == {(8, 16), (16,), (16, 4), (4,), (8, 8)}
    assert all(isinstance(leaf.value, jax.ShapeDtypeStruct) for leaf in leaves)
    assert (workload.sizes, workload.words) == ({"batch": 8, "features": 8}, "batch 8 x features 8")


def test_read_workload_of_a_number_makes_tokens_of_each_input_without_a_default():
    workload = read(loss_fn=token_loss, batch=8, seq=2048)
    for name in ("tokens", "targets"):
        assert dict(workload.inputs[name].named_shape) == {"batch": 8, "seq": 2048}
        assert workload.inputs[name].data_array.dtype == jnp.int32
    assert (len(workload.inputs), workload.words) == (2, "batch 8 x seq 2,048")


def test_read_workload_takes_no_rest_of_a_loss_for_an_input():
    def loss_fn(model, rng, state, tokens, *rest, **options):
        return jnp.float32(0), state, {}

    assert [*read(loss_fn=loss_fn, batch=8, seq=4).inputs] == ["tokens"]


def test_read_workload_calls_axes_by_the_names_that_are_given():
    tokens = read(loss_fn=token_loss, batch=8, seq=4, names={"seq": "time"}).inputs["tokens"]
    assert dict(tokens.named_shape) == {"batch": 8, "time": 4}
    x = pz.nx.ones({"examples": 8, "features": 8})
    assert read(batch={"x": x}, names={"batch": "examples"}).batch_axis == "examples"


# What is built


@pytest.mark.parametrize("library", LIBRARIES)
def test_read_workload_of_a_number_gives_plain_tokens_to_those_who_take_them(library):
    build, _, plain_arrays = LIBRARIES[library]
    workload = read(build(), token_loss, batch=8, seq=4, plain_arrays=plain_arrays)
    assert all(leaf.names is None for leaf in leaves_of(workload.as_given(workload.inputs)))
    assert workload.sizes == {"batch": 8, "seq": 4}


def test_build_makes_the_step_that_layouts_make():
    layout, optimizer = pzs.Layout.fully_sharded(min_size=1), optax.adam(1e-3)
    candidate, x = Candidate((("data", 4),), layout), pz.nx.ones({"batch": 8, "features": 8})
    workload = read(pzs.abstract_model(penzai_mlp), optimizer=optimizer, batch={"x": x})
    options = {"mesh": candidate.mesh, "loss_fn": mlp_loss, "optimizer": optimizer}
    state, step = layout.build(penzai_mlp, rng=jax.random.key(0), **options)
    inputs = layout.shard_batch({"x": jax.tree.map(make_struct, x)}, candidate.mesh)

    texts = [
        step.trace(state, **inputs).lower(lowering_platforms=("cpu",)).as_text()
        for step, state, inputs in (workload.build(candidate), (step, state, inputs))
    ]
    assert texts[0] == texts[1]


# What is refused

MISTAKES = {
    "no batch": ({"batch": 0, "seq": 16, "loss_fn": token_loss}, "batch"),
    "text": ({"batch": "8", "seq": 16, "loss_fn": token_loss}, "batch"),
    "the input itself": ({"batch": np.ones((8, 8)), "seq": 16}, "batch"),
    "no seq": ({"batch": 8, "loss_fn": token_loss}, "seq"),
    "seq beside arrays": ({"seq": 16}, "seq"),
    "another input": ({"batch": {"y": np.ones(8)}}, "batch"),
    "an input less": ({"batch": {}}, "batch"),
    "sizes": ({"batch": {"batch": 8, "seq": 16}, "loss_fn": token_loss}, "batch"),
    "a number": ({"batch": {"x": 8}}, "batch"),
    "a shape": ({"batch": {"x": (8, 4)}}, "batch"),
    "both kinds": (
        {
            "loss_fn": token_loss,
            "batch": {"tokens": np.ones(8), "targets": pz.nx.ones({"batch": 8})},
        },
        "batch",
    ),
    "no axis of the batch": ({"batch": {"x": pz.nx.ones({"examples": 8})}}, "batch"),
    "another signature": ({"loss_fn": lambda model, x: 0.0}, "loss_fn"),
    "no loss": ({"loss_fn": 3}, "loss_fn"),
    "a class": ({"optimizer": optax.adam}, "optimizer"),
    "a function": ({"model": penzai_mlp}, ""),
    "no arrays": ({"model": {"rate": "0.1"}}, "model"),
    "no signature": ({"loss_fn": max}, "loss_fn"),
    "no names": ({"names": "mlp"}, "names"),
    "names of no axis": ({"names": {"neurons": "mlp"}}, "neurons"),
    "blocks of a dictionary": ({"model": build_dict(), "blocks": nnx.Linear}, "blocks"),
    "blocks that there are not": ({"blocks": pz.nn.Attention}, ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_read_workload_names_a_mistake(mistake):
    given, path = MISTAKES[mistake]
    problems = problems_of(RuleTypeError, read, **given)
    assert {(problem.path, bool(problem.fix)) for problem in problems} == {(path, True)}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(("compiled", given) for given in (0, 2.5)),
        *(("microbatches", given) for given in ((), (0,), 2, "12")),
        *(("rematerialise", given) for given in ((), None, "dots")),
        *(("keep", given) for given in ("model", ["neurons"], {"neurons": 3})),
    ],
)
def test_read_options_names_a_mistake(name, given):
    options = {"compiled": 1, "microbatches": (1,), "rematerialise": (None,), "keep": None}
    problems = Problems("")
    read_options(**options | {name: given}, problems=problems)
    (problem,) = problems
    assert problem.path == name
    # What the fix says can be read.
    written = eval(f"dict({problem.fix.removeprefix('Write ').removesuffix('.')})")
    right = Problems("")
    found = read_options(**options | written, problems=right)
    assert found == {x: (options | written)[x] for x in options if x != "compiled"}
    assert not len(right)


def test_choose_layout_names_mistakes_of_all_its_arguments_at_once():
    given = {"devices": 8, "batch": 8, "compiled": 0, "keep": "model"}
    state = pzs.TrainState.initial_state(penzai_mlp(), optax.adam(1e-3), jax.random.key(0))
    paths = problem_paths(RuleTypeError, pzs.choose_layout, state, 3, "adam", **given)
    assert paths == ["compiled", "keep", "devices", "model", "loss_fn", "optimizer"]


# Models without names


def test_read_workload_says_how_names_are_found():
    options = {"loss_fn": token_loss, "batch": 4, "seq": 16, "plain_arrays": True}
    problems = refused(RuleTypeError, read, make_weights(), **options)
    assert {*problems} == {"embed", "up", "down"}
    assert all("infer_names" in problem.fix for problem in problems.values())


def test_read_workload_says_how_arrays_stay_whole():
    model = {**build_dict(), "unused": np.ones((5, 5)), "bias": np.ones(3)}
    options = {"loss_fn": token_loss, "batch": 4, "seq": 16, "plain_arrays": True}
    problems = refused(RuleTypeError, read, model, **options)
    assert {*problems} == {"unused", "bias"}
    (fix,) = {problem.fix for problem in problems.values()}
    pasted = {"model": model, "penzai_shard": pzs}
    exec(fix.removeprefix("Write ").removesuffix("."), pasted)
    names = {leaf.path: leaf.names for leaf in leaves_of(read(pasted["model"], **options).model)}
    kept = {leaf.path: leaf.names for leaf in leaves_of(build_dict())}
    assert names == {**kept, "unused": (None, None), "bias": (None,)}
