"""What ``choose_layout`` is given, read: models of all kinds, inputs, devices, mistakes."""

import functools
import types

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz
from penzai.models import simple_mlp

import penzai_shard as pzs
from penzai_shard.choosing.choices import asked_devices
from penzai_shard.choosing.choices.asked_devices import read_devices
from penzai_shard.choosing.choices.asked_problem import read_problem
from penzai_shard.choosing.choices.asked_search import check_search
from penzai_shard.errors import MeshError, RuleTypeError
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.named_leaves import leaves_of


def build_mlp(seed=0):
    return simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=jax.random.key(seed), feature_sizes=[4, 8]
    )


def loss_fn(model, rng, state, x):
    return jnp.mean(model(x).unwrap("batch", "features_out")), state, {}


def of_tokens(model, rng, state, tokens, targets, *, weight=1.0):
    return jnp.float32(0), state, {}


def read(model=None, loss=loss_fn, optimizer=None, batch=None, seq=None, plain_arrays=False):
    return read_problem(
        build_mlp() if model is None else model,
        loss,
        optax.adam(1e-3) if optimizer is None else optimizer,
        {"x": pz.nx.ones({"batch": 8, "features": 4})} if batch is None else batch,
        seq,
        plain_arrays,
    )


@pytest.mark.parametrize("abstract", [False, True])
def test_a_model_with_values_and_one_without_are_the_same_problem(abstract):
    model = pzs.abstract_model(build_mlp) if abstract else build_mlp()
    asked = read(model)
    arrays = [leaf.array for leaf in leaves_of(asked.problem.model) if leaf.shape]
    assert {array.shape for array in arrays} == {(4, 8), (8,)}
    assert all(isinstance(array, jax.ShapeDtypeStruct) for array in arrays)
    assert isinstance(asked.problem.inputs["x"].data_array, jax.ShapeDtypeStruct)
    assert asked.sizes == {"batch": 8, "features": 4}
    assert asked.words == "batch 8 x features 4"
    assert asked.step_options == {}


def test_numbers_stand_for_tokens_of_each_input_that_has_no_default():
    asked = read(loss=of_tokens, batch=8, seq=16)
    assert set(asked.problem.inputs) == {"tokens", "targets"}
    for tokens in asked.problem.inputs.values():
        assert dict(tokens.named_shape) == {"batch": 8, "seq": 16}
        assert tokens.data_array.dtype == jnp.int32
    assert asked.problem.loss_fn is of_tokens


class Linear(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "hidden"))
        return nn.Dense(8, use_bias=False, kernel_init=init)(x)


LINEAR_NAMES = {"weight": ("hidden", "embed"), "bias": ("hidden",)}


def plain_models():
    """Models that compute with plain arrays, what computes with them, and the options they need."""
    weights = {"weight": jnp.ones((8, 4)), "bias": jnp.ones(8)}
    linear = eqx.nn.Linear(4, 8, key=jax.random.key(0))
    boxed = Linear().init(jax.random.key(0), jnp.ones((2, 4)))
    return {
        "equinox": (pzs.name_axes(linear, LINEAR_NAMES), lambda m, x: jax.vmap(m)(x), False),
        "linen": (boxed, lambda m, x: Linear().apply(m, x), False),
        "dictionary": (
            pzs.name_axes(weights, LINEAR_NAMES),
            lambda m, x: x @ m["weight"].T + m["bias"],
            True,
        ),
    }


@pytest.mark.parametrize("kind", ["equinox", "linen", "dictionary"])
def test_a_loss_for_plain_arrays_is_priced_with_named_ones(kind):
    model, apply, plain_arrays = plain_models()[kind]

    def plain_loss(model, rng, state, x):
        assert isinstance(x, jax.Array)
        assert x.shape == (4, 4)  # one of two microbatches
        return jnp.mean(apply(model, x) ** 2), state, {}

    asked = read(
        model, plain_loss, batch={"x": np.ones((8, 4), "float32")}, plain_arrays=plain_arrays
    )
    assert dict(asked.problem.inputs["x"].named_shape) == {"batch": 8}
    assert asked.step_options["batch_axis"] == 0
    mesh = pzs.make_mesh(data=8, abstract=True)
    layout = pzs.Layout(parameters={"hidden": "data"}, compute={"batch": "data"}, blocks=())
    step, state, inputs = asked.problem.built(layout, mesh, microbatches=2)
    new_state, _ = jax.eval_shape(lambda state, inputs: step(state, **inputs), state, inputs)
    assert {leaf.shape for leaf in leaves_of(new_state.params)} == {
        leaf.shape for leaf in leaves_of(state.params)
    }


def test_a_batch_that_is_called_otherwise_is_split_into_microbatches():
    def loss(model, rng, state, x):
        return jnp.mean(model(x).untag("examples", "features").unwrap()), state, {}

    inputs = {"x": pz.nx.ones({"examples": 8, "features": 4})}
    choices = pzs.choose_layout(
        *(build_mlp(), loss, optax.adam(1e-3)),
        **{"devices": "v5e:4", "batch": inputs, "names": {"batch": "examples"}},
        **{"microbatches": (1, 2), "propagated": 8, "compiled": 0, "progress": False},
    )
    assert not choices.found.refused
    for priced in choices.found.priced.values():
        flops = {parts: set() for parts in (1, 2)}
        for one in priced:
            flops[one.candidate.microbatches].add(one.cost.flops)
        assert flops[1] == flops[2]
    assert choices.best.step_options["batch_axis"] == "examples"


def test_numbers_stand_for_plain_tokens_where_the_model_computes_with_plain_arrays():
    model, *_ = plain_models()["equinox"]

    def plain_loss(model, rng, state, tokens):
        assert isinstance(tokens, jax.Array)
        assert tokens.shape == (8, 16)
        return 0.0, state, {}

    asked = read(model, plain_loss, batch=8, seq=16)
    assert asked.sizes == {"batch": 8, "seq": 16}
    asked.problem.loss_fn(
        model=None, rng=None, state=None, tokens=pz.nx.ones({"batch": 8, "seq": 16})
    )


def test_a_model_without_names_is_refused_with_lines_that_give_it_some():
    model = eqx.nn.Linear(4, 8, key=jax.random.key(0))
    with pytest.raises(RuleTypeError) as caught:
        read(model, of_tokens, batch=8, seq=16)
    text = str(caught.value)
    assert "    names = penzai_shard.infer_names(\n        lambda model, targets, tokens: " in text
    assert "input_names=[('batch', 'seq'), ('batch', 'seq')],\n" in text
    assert "    model = penzai_shard.name_axes(model, names)\n" in text
    assert "  weight: shape (8, 4).\n" in text
    assert caught.value.problems == ("weight: shape (8, 4).", "bias: shape (8,).")
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    compile("\n".join(line[4:] for line in lines), "pasted", "exec")


def test_what_was_not_decided_is_said_to_stay_whole_by_lines_that_work():
    weights = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4)), "unused": jnp.ones((5, 5))}

    def apply(weights, x):
        return x + jax.nn.relu(x @ weights["up"]) @ weights["down"]

    def plain_loss(model, rng, state, x):
        return jnp.mean(apply(model, x) ** 2), state, {}

    found = pzs.infer_names(apply, weights, jnp.ones((8, 4)), input_names=[("batch", None)])
    model = pzs.name_axes(weights, found)
    batch = {"x": jnp.ones((8, 4))}
    with pytest.raises(RuleTypeError, match="Name what infer_names did not decide") as caught:
        read(model, plain_loss, batch=batch, plain_arrays=True)
    assert caught.value.problems == ("unused: shape (5, 5).",)
    lines = [line[4:] for line in str(caught.value).splitlines() if line.startswith("    ")]
    pasted = {"model": model, "penzai_shard": pzs}
    exec("\n".join(lines), pasted)
    asked = read(pasted["model"], plain_loss, batch=batch, plain_arrays=True)
    assert {leaf.path: leaf.names for leaf in leaves_of(asked.problem.model)} == {
        "down": ("neurons", "embedding"),
        "unused": (None, None),
        "up": ("embedding", "neurons"),
    }


MISTAKES = {
    "no batch size": ({"batch": 0}, "batch: is 0, and must be a positive number, or a mapping"),
    "no seq": ({"batch": 8, "loss": of_tokens}, "seq: is None, and .* Write seq=2048"),
    "seq beside arrays": ({"seq": 16}, "seq: is for a batch that is given as a number"),
    "other inputs": ({"batch": {"y": jnp.ones(8)}}, "batch: has 'y', and loss_fn takes 'x'"),
    "an input less": ({"batch": {}}, "batch: loss_fn takes 'x' too, which is not in it"),
    "sizes in a mapping": (
        {"batch": {"batch": 8, "seq": 16}, "loss": of_tokens},
        r"given:\n  batch: is {'batch': 8, 'seq': 16}, sizes and no inputs\. Write .*seq=16\.$",
    ),
    "a number as input": (
        {"batch": {"x": 8}},
        "batch: 'x' is the number 8, .* Write batch=8, seq=",
    ),
    "a text of a number": (
        {"batch": "8", "loss": of_tokens, "seq": 16.0},
        "Write batch=8.*\n.*seq=16.",
    ),
    "no array": ({"batch": {"x": "text"}}, "batch: 'x' is a str, and must be an array"),
    "a shape": (
        {"batch": {"x": (8, 4)}},
        r"batch: 'x' is a shape, .* Write jax.ShapeDtypeStruct\(\(8, 4\), 'int32'\)",
    ),
    "the one input": ({"batch": jnp.ones((8, 4))}, r"inputs by name. Write batch=\{'x': \.\.\.\}"),
    "the one input, named": ({"batch": pz.nx.ones({"batch": 8})}, r"Write batch=\{'x': \.\.\.\}"),
    "the shape of the one input": (
        {"batch": (8, 4)},
        r"Write batch=\{'x': jax.ShapeDtypeStruct\(\(8, 4\), 'int32'\)\}",
    ),
    "another signature": (
        {"loss": lambda m, x: 0.0},
        # Its inputs are not what they seem to be, and nothing is said of them.
        r"given:\n  loss_fn: has no parameter 'model' and none 'rng' and none 'state'. It is",
    ),
    "no inputs": (
        {"loss": lambda model, rng, state, **batch: None, "batch": 8, "seq": 16},
        "loss_fn: takes no inputs by name, .*batch={'tokens': jax.ShapeDtypeStruct",
    ),
    "no loss": ({"loss": 3}, "loss_fn: is an int, and must be loss_fn"),
    "an optimizer's class": ({"optimizer": optax.adam}, "optimizer: is a function, and must be"),
    "a function for the model": ({"model": build_mlp}, "not the function build_mlp. Give what it"),
    "no arrays": ({"model": {}}, "the model has no arrays, so that there is nothing to lay out"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_what_is_computed_is_named(mistake):
    given, message = MISTAKES[mistake]
    with pytest.raises(RuleTypeError, match=message):
        read(**given)


def test_a_train_state_is_refused_and_all_mistakes_are_reported_at_once():
    state = pzs.TrainState.initial_state(build_mlp(), optax.adam(1e-3), jax.random.key(0))
    with pytest.raises(RuleTypeError) as caught:
        read(state, loss=3, optimizer="adam")
    assert len(caught.value.problems) == 3
    assert "model: is a train state" in str(caught.value)


def test_devices_are_a_name_a_mesh_or_a_number():
    mesh = pzs.make_mesh(data=4, model=2, abstract=True)
    by_name = read_devices("v5e:8", None, None)
    assert by_name.mesh_shape is None
    assert by_name.memory == by_name.hardware.memory
    assert read_devices(8, "v5e", None) == by_name
    assert read_devices(jax.devices(), "v5e", None) == by_name
    assert read_devices(np.int64(8), "v5e", np.int64(2**30)).memory == 2**30
    assert read_devices(8, by_name.hardware, "2GiB").memory == 2 * 2**30
    of_mesh = read_devices(mesh, "v5e:2x4", 1e9)
    assert (of_mesh.mesh_shape, of_mesh.memory) == ({"data": 4, "model": 2}, 10**9)
    assert of_mesh.words == "8 devices (v5e:2x4, mesh (data=4, model=2))"
    assert read_devices(8, "cpu", "2GiB") == read_devices("cpu:8", None, "2GiB")


def test_a_mesh_of_known_devices_says_what_they_are(monkeypatch):
    mesh = pzs.make_mesh(data=8)
    asked = r"\(data=8\) has 8 devices of kind 'cpu', and how fast .* are: hardware=.cpu., memory="
    with pytest.raises(MeshError, match=asked):
        read_devices(mesh, None, None)
    monkeypatch.setattr(
        asked_devices, "PUBLISHED", {"v5e": types.SimpleNamespace(device_kind="cpu")}
    )
    assert read_devices(mesh, None, None).hardware.name == "v5e:2x4"


OTHER_DEVICES = {
    "an unknown kind": (("v5x:8", None, None), MeshError, "'v5x' is not known"),
    "no such slice": (("v5e:7", None, None), MeshError, "no slices of 7 chips"),
    "a name alone": (("v5e", None, None), MeshError, "is not the name of hardware"),
    "hardware twice": (("v5e:8", "v5e", None), RuleTypeError, "Leave out hardware="),
    "a number alone": ((8, None, None), MeshError, 'there are 8 devices, .* hardware="v5e"'),
    "simulated devices": ((8, "cpu", None), MeshError, "a device of 'cpu:8' has is not known"),
    "a truth": ((True, None, None), RuleTypeError, 'devices must be a name such as "v5e:32", a me'),
    "the devices themselves": ((jax.devices(), None, None), MeshError, "8 devices of kind 'cpu'"),
    "the sizes of a mesh": (
        ({"data": 4, "model": 2}, "v5e", None),
        RuleTypeError,
        r"devices=penzai_shard.make_mesh\({'data': 4, 'model': 2}, abstract=True\)\.$",
    ),
    "a list": (
        ([4, 2], None, None),
        RuleTypeError,
        r"make_mesh\({'data': 4, 'model': 2}, abstract=True\), hardware=\"v5e\"\.$",
    ),
    "a list of texts": ((["v5e"], None, None), RuleTypeError, r"hardware=\"v5e\", not \['v5e'\].$"),
    "other numbers": ((8, "v5e:4x4", None), MeshError, "there are 8. .* alone: hardware='v5e'"),
    "a number as hardware": ((8, 3, None), RuleTypeError, "hardware must be a name such as"),
    "no size": (("v5e:8", None, "much"), RuleTypeError, "memory 'much' is not a size"),
    "GiB as bytes": (("v5e:8", None, 16), RuleTypeError, "too few .* Write '16GiB'"),
    "a text of bytes": (("v5e:8", None, "16"), RuleTypeError, "too few .* Write '16GiB'"),
    "a number as text": (("8", None, None), MeshError, "Say what they are: 'v5e:8'"),
    "no number": ((float("nan"), "v5e", None), RuleTypeError, "a mesh, or a number .*, not nan"),
    "no end of devices": ((np.inf, "v5e", None), RuleTypeError, "or a number with .*, not inf"),
    "half a device": ((7.5, "v5e", None), RuleTypeError, "or a number with .*, not 7.5"),
    "a mesh of nothing": (
        (jax.sharding.AbstractMesh((), ()), "v5e", None),
        MeshError,
        r"no mesh axes\. Write devices=penzai_shard.make_mesh\({\"data\": 8}, abstract=True\)",
    ),
    "no memory": (("v5e:8", None, 0), RuleTypeError, "memory must be a number of bytes"),
    "no end of memory": (("v5e:8", None, np.inf), RuleTypeError, "must be a number of .* not inf"),
}


@pytest.mark.parametrize("mistake", OTHER_DEVICES)
def test_a_mistake_in_what_is_computed_on_is_named(mistake):
    given, error, message = OTHER_DEVICES[mistake]
    with pytest.raises(error, match=message):
        read_devices(*given)


def test_memory_that_is_not_known_has_to_be_said():
    own = Hardware("own", 1e14, None, Hardware.read("h100:8").network)
    with pytest.raises(MeshError, match=r"of 'own' has is not known\. Say it: memory="):
        read_devices(8, own, None)
    assert read_devices(8, own, "1GiB").memory == 2**30


def check(
    keep=None, rematerialise=(None,), microbatches=(1,), propagated=0, compiled=0, names=None
):
    check_search(keep, rematerialise, microbatches, propagated, compiled, names=names)


SEARCH_MISTAKES = {
    "keep as text": ({"keep": "batch"}, r'keep: is .batch.*Write keep=\{"batch": "data"\}'),
    "keep over a number": ({"keep": {"batch": 4}}, r"Write keep=\{'batch': 'data'\}"),
    "one name": ({"names": "mlp"}, r'Write names=\{"neurons": "mlp"\}'),
    "one policy": ({"rematerialise": "dots"}, r"Write rematerialise=\['dots'\]"),
    "no policy": ({"rematerialise": None}, r"Write rematerialise=\[None\]"),
    "another policy": (
        {"rematerialise": ["dot"]},
        "no checkpoint policy 'dot'. Did you mean 'dots'",
    ),
    "one number": ({"microbatches": 2}, r"Write microbatches=\[2\]"),
    "no microbatch": ({"microbatches": [0]}, r"microbatches: is \[0\], and must list positive"),
    "fewer than none": ({"propagated": -1}, "propagated: is -1, .* or propagated=0 for none"),
    "yes": ({"compiled": True}, "compiled: is True, and must be a number of layouts"),
}


@pytest.mark.parametrize("mistake", SEARCH_MISTAKES)
def test_what_says_nothing_about_a_search_is_refused_with_what_to_write(mistake):
    given, message = SEARCH_MISTAKES[mistake]
    with pytest.raises(RuleTypeError, match=message):
        check(**given)


def test_a_search_may_be_restricted():
    check({"batch": None}, (None, "dots", "nothing"), [1, 2], 200, 12)


def test_an_error_on_plain_arrays_says_that_they_are_plain_and_what_inputs_are():
    model, apply, plain_arrays = plain_models()["dictionary"]
    named = {"x": pz.nx.ones({"batch": 8, "features": 4})}

    def failing(model, rng, state, x):
        return jnp.mean(apply(model, x) ** 2), state, {}

    layout = pzs.Layout(parameters={}, compute={"batch": "data"}, blocks=())
    notes = []
    for is_plain in (plain_arrays, False):
        asked = read(model, failing, batch=named, plain_arrays=is_plain)
        step, state, inputs = asked.problem.built(layout, pzs.make_mesh(data=8, abstract=True))
        with pytest.raises(TypeError) as caught:
            jax.eval_shape(functools.partial(step, **inputs), state)
        notes.append([note for note in caught.value.__notes__ if "loss function" in note])
    assert notes[0] == [
        "The loss function was given a model of plain arrays, and inputs: x (8, 4) "
        "('batch', 'features'). Inputs with logical axis names stay so: unwrap x."
    ]
    [note] = notes[1]
    assert note.endswith("StatefulTrainer.build or choose_layout.")


def test_programs_are_compiled_for_simulated_devices_or_for_tpus():
    tpus, gpus = read_devices("v5e:8", None, None), read_devices("h100:8", None, None)
    assert tpus.compiled_for("simulated") is None
    assert tpus.compiled_for("hardware").name == "v5e:2x4"
    with pytest.raises(
        RuleTypeError, match=r"compiles for TPUs, and these are h100:.*Leave it out"
    ):
        gpus.compiled_for("hardware")
    with pytest.raises(RuleTypeError, match=r"'simulated' or 'hardware', not 'tpu'\. Leave it"):
        tpus.compiled_for("tpu")
