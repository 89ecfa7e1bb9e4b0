"""What a lock lets through and what it does not; a judge reads the same programs otherwise."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.compiled_programs import Module
from penzai_shard.errors import LockError, RuleTypeError
from penzai_shard.inspection.program_view import compile_step
from tests.inspection.locked_jobs import (
    ACTIVATIONS,
    RULES,
    Job,
    compiled,
    mean_square,
    mesh,
)


@pytest.fixture(scope="module")
def base():
    return compiled()


def after(path, layer):
    """An edit that puts a layer behind one that is called by the name of its parameter."""

    def is_meant(node):
        return isinstance(node, pz.nn.Linear) and path in node.weights.label

    return pzs.Recipe(pzs.insert_after(is_meant, layer)).apply


def in_a_loop(model, x):
    """Twice as many examples, in two turns."""

    def turn(total, factor):
        return total + mean_square(model(x * factor)), None

    return jax.lax.scan(turn, 0.0, jnp.arange(1.0, 3.0, dtype=jnp.float32))[0]


def with_a_metric(model, x):
    y = model(x)
    return mean_square(y) + y.untag(*y.named_shape).max().unwrap()


BEFORE = {"batch": None}  # A batch that only the constraint splits.
WITH_BIAS = {"bias": True}
HALF = {"dtype": "bfloat16"}
EVERYWHERE = pzs.ConstrainShardingByName(mesh(), {})
REMAT = pzs.Recipe(pzs.wrap(pz.nn.Residual, pzs.Checkpointed)).apply
# What the job was, if it was not the usual one; what it is now; and what must be said of it, of the
# array or the layer that it is about.
WORSE = {
    "a rule is removed": (
        {},
        {"rules": {"embedding": "data"}},
        [
            "model/block_0/up.weights: spec was P('data', 'model'), is now P('data')",
            "momentum/block_0/down.weights: spec was P('model', 'data'), is now P(None, 'data')",
            "block_0/up: 1 all-gather over 'data' in the forward pass: 1.0 KiB → 2.0 KiB",
        ],
    ),
    "parameters are not split over data": (
        {},
        {"rules": {"neurons": "model"}},
        [
            "model/block_0/down.weights: spec was P('model', 'data'), is now P('model')",
            "parameters: 512 B → 2.0 KiB (+300%, tolerance 5%)",
        ],
    ),
    "nothing is split": (
        {},
        {"rules": {}},
        ["model/block_0/up.weights: spec was P('data', 'model'), is now P()"],
    ),
    "the optimizer's state is replicated": (
        {},
        {"momentum_rules": {}},
        [
            "momentum/block_0/up.weights: spec was P('data', 'model'), is now P()",
            "momentum/block_0/down.weights: spec was P('model', 'data'), is now P()",
        ],
    ),
    "mesh axes are swapped": (
        {},
        {"rules": {"embedding": "model", "neurons": "data"}},
        [
            "model/block_0/up.weights: spec was P('data', 'model'), is now P('model', 'data')",
            "block_0/up: 1 all-to-all over 'model' (1.0 KiB) is new in the forward pass",
        ],
    ),
    "both mesh axes split one dimension": (
        {},
        {"rules": {"embedding": ("data", "model")}},
        [
            "model/block_0/up.weights: spec was P('data', 'model'), is now P(('data', 'model'))",
            "block_0/up: 1 all-gather over 'data x model' (2.0 KiB) is new in the forward pass",
        ],
    ),
    "an activation is pinned over the wrong mesh axes": (
        {},
        {"constraint": {"batch": "model", "neurons": "data"}},
        ["block_0/up: 1 all-to-all over 'data' (512 B) is new in the forward pass"],
    ),
    "a constraint is removed": (
        BEFORE,
        BEFORE | {"constraint": None},
        ["block_0/up: 1 all-reduce over 'data' (512 B) is new in the forward pass"],
    ),
    "a stray constraint gathers an activation": (
        {},
        {"edit": after("up", EVERYWHERE)},
        [
            "block_0/up: 1 all-gather over 'model' (512 B) is new in the forward pass",
            "block_0/constrain_sharding_by_name: 1 all-gather over 'data' (1.0 KiB) is new in the "
            "backward pass",
        ],
    ),
    "the batch is not split": (
        {},
        {"batch": None},
        [
            "x: spec was P('data'), is now P()",
            "inputs: 640 B → 1.0 KiB (+60%, tolerance 5%)",
        ],
    ),
    "the batch is twice as large": (
        {},
        {"batch_size": 16},
        [
            "x: was float32[8,16], is now float32[16,16]",
            "block_0/down: 1 all-reduce over 'model' in the forward pass: 128 B → 256 B",
        ],
    ),
    "nothing is donated": (
        {},
        {"donate": False},
        [
            "model/block_0/up.weights: was donated, is not any more",
            "momentum/block_0/up.weights: was donated, is not any more",
            "donated: 1.0 KiB → 0 B",
        ],
    ),
    "parameters are gathered once more, for rematerialisation": (
        {},
        {"edit": REMAT},
        # On jax 0.12 programs say of what a block gathers again only that it is the block's.
        [
            (
                "block_0/up: 1 all-gather over 'data' (1.0 KiB) is new in the backward pass",
                "block_0: 2 all-gathers over 'data' (2.0 KiB) are new in the backward pass",
            )
        ],
    ),
    "a parameter is renamed": (
        {},
        {"up": "top"},
        [
            "model/block_0/up.weights: is gone",
            "model/block_0/top.weights: is new among the parameters, float32[16,32], "
            "spec P('data', 'model')",
        ],
    ),
    "a parameter is added": (
        {},
        WITH_BIAS,
        [
            "model/block_0/bias.bias: is new among the parameters, float32[16], spec P('data')",
            "block_0/bias: 1 all-gather over 'data' (64 B) is new in the forward pass",
        ],
    ),
    "a parameter is removed": (WITH_BIAS, {}, ["model/block_0/bias.bias: is gone"]),
    "a block is added": (
        {},
        {"blocks": 2},
        [
            "model/block_1/up.weights: is new among the parameters, float32[16,32], "
            "spec P('data', 'model')",
            "block_1/down: 1 all-reduce over 'model' (128 B) is new in the forward pass",
        ],
    ),
    "a dtype is doubled": (
        HALF,
        {},
        [
            "model/block_0/up.weights: was bfloat16[16,32], is now float32[16,32]",
            "parameters: 256 B → 512 B (+100%, tolerance 5%)",
        ],
    ),
    "all-reduces are moved into a loop": (
        {},
        {"loss": in_a_loop},
        [
            "block_0/down: 1 all-reduce over 'model' (128 B) in the forward pass became 2 (256 B)",
            "temporaries: ",
        ],
    ),
    "a metric needs all devices": (
        {},
        {"loss": with_a_metric},
        ["loss: 2 all-reduces over 'data' (8 B) are new in the forward pass"],
    ),
}


_compiled = {}


def compiled_once(**changes):
    key = repr(sorted((name, repr(value)) for name, value in changes.items()))
    if key not in _compiled:
        _compiled[key] = compiled(**changes)
    return _compiled[key]


@pytest.mark.parametrize("name", WORSE)
def test_a_change_for_the_worse_is_refused_and_said_of_the_right_layer_or_array(name):
    was, now, words = WORSE[name]
    before, after = compiled_once(**was), compiled_once(**now)
    report = before.lock.check_lock(after.lock, improvements="pass")
    assert not report
    said = [str(each) for each in report.failures]
    for each in words:
        assert any(text.startswith(each) for text in said), (each, said)
    if after.sent > before.sent:
        of_layers = [d for d in report.differences if d.what.count(" over ")]
        assert any(d.effect == "worse" for d in of_layers), said
    assert after.lock.check_lock(after.lock).differences == ()
    assert len(after.lock.check_lock(before.lock).differences) == len(report.differences)


def same_step_by_another_name(step):
    def renamed(model, momentum, x):
        return step(model, momentum, x)

    return renamed


def compiled_in_parts(step):
    return jax.jit(lambda model, momentum, x: jax.jit(step)(model, momentum, x))


def in_another_order(model, momentum, x):
    return (model, dict(reversed(momentum.items()))), {"x": x}


def same_loss(model, x):
    unused = jnp.ones(3) * 2
    return jax.jit(mean_square)(model(x)) + 0 * unused.sum()


def scoped(model):
    return pzs.Recipe(pzs.wrap(pz.nn.Linear, pzs.Scoped, name="mine")).apply(model)


PINNED = pzs.ConstrainShardingByName(mesh(), ACTIVATIONS)
HARMLESS = {
    "compiled again": {},
    "initialised from another seed, concrete arrays": {"concrete": True, "seed": 3},
    "another learning rate": {"learning_rate": 0.3},
    "the function has another name": {"wrapped": same_step_by_another_name},
    "compiled in parts": {"wrapped": compiled_in_parts},
    "by position": {"arrange": lambda model, momentum, x: ((model, momentum, x), {})},
    "a dictionary in another order": {"arrange": in_another_order},
    "the loss compiled by itself": {"loss": same_loss},
    "in Jitted": {"edit": pzs.Jitted},
    "scopes": {"edit": pzs.scope_layers().apply},
    "some scopes": {"edit": scoped},
    "a layer that does nothing": {"edit": after("up", pz.nn.Identity())},
    "the same constraint twice": {"edit": after("up", PINNED)},
    "edited and stripped": {"edit": lambda model: pzs.strip(pzs.Jitted(scoped(model)))},
    "in the precision that it has": {"edit": lambda model: pzs.InPrecision(model, "float32")},
    "rules as pairs": {"rules": list(RULES.items())},
    "rules combined": {"rules": pzs.data_parallel() | dict(reversed(RULES.items()))},
    "a constraint in another order": {"constraint": dict(reversed(ACTIVATIONS.items()))},
    "an equal mesh": {"on": pzs.make_mesh({"data": 4, "model": 2})},
    "a mesh without devices": {"on": mesh().abstract_mesh},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_passes_and_leaves_the_lock_as_it_is(name, base):
    now = compiled(**HARMLESS[name])
    assert (now.executed, now.sent) == (base.executed, base.sent)
    report = base.lock.check_lock(now.lock, tolerance=0)
    assert report.differences == (), str(report)
    assert now.lock.to_json() == base.lock.to_json()


def test_a_lock_has_as_many_collectives_of_each_kind_as_the_judge_counts(base):
    for each in [base, *_compiled.values()]:
        counted = {}
        for group, count in each.lock.content.collectives.items():
            counted[group.kind] = counted.get(group.kind, 0) + count.count
        judged = {}
        for (kind, _), count in each.executed.items():
            judged[kind] = judged.get(kind, 0) + count
        assert counted == judged


def train_step(mu="float32", replicated=False, **options):
    """A step of ``build_train_step_fn``, and what it is called with, all abstract."""
    model = pzs.abstract_model(Job().build)
    optimizer = optax.adam(0.1, mu_dtype=mu)
    state = pzs.TrainState.initial_state(model, optimizer, jax.random.key(0))
    shardings = pzs.train_state_sharding(state, mesh(), RULES)
    if replicated:
        whole = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec())
        opt_state = jax.tree.map(lambda _: whole, shardings.opt_state)
        shardings = dataclasses.replace(shardings, opt_state=opt_state)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )
    step = pzs.build_train_step_fn(
        lambda model, rng, state, x: (mean_square(model(x)), state, {}),
        train_state_shardings=shardings,
        **{"donate_params_and_state": True} | options,
    )
    return step, state, pzs.shard_batch(pz.nx.ones({"batch": 8, "embedding": 16}), mesh(), RULES)


@pytest.fixture(scope="module")
def of_train_step():
    step, state, x = train_step()
    return pzs.ShardingLock.of(step, state, x=x)


WORSE_STEPS = {
    "the optimizer's state is replicated": (
        {"replicated": True},
        "opt_state/0/mu/block_0/up.weights: spec was P('data', 'model'), is now P()",
    ),
    "nothing is donated": (
        {"donate_params_and_state": False},
        "opt_state/0/nu/block_0/down.weights: was donated, is not any more",
    ),
    "gradients are accumulated, and gathered and reduced each time": (
        {"accumulate_steps": 2},
        "block_0/down: 1 all-reduce over 'model' (128 B) in the forward pass became 2 (128 B)",
    ),
}


@pytest.mark.parametrize("name", WORSE_STEPS)
def test_a_train_step_that_became_worse_is_refused(name, of_train_step):
    changes, words = WORSE_STEPS[name]
    step, state, x = train_step(**changes)
    report = of_train_step.check(step, state, x=x)
    assert not report
    assert words in [str(each) for each in report.differences]


def padded_step(vocabulary):
    """A step of a model of one matrix, whose vocabulary of 29 to 31 is stored as 32."""
    model = pzs.abstract_model(
        lambda: pz.nn.Linear.from_config(
            "head", jax.random.key(0), {"embedding": 16}, {"vocabulary": vocabulary}
        )
    )
    plan = pzs.make_plan(model, mesh(), {"vocabulary": ("data", "model")}, on_indivisible="pad")
    state = pzs.TrainState.initial_state(
        plan.restore_structs(), optax.sgd(0.1, momentum=0.9), jax.random.key(0)
    )
    step = pzs.build_train_step_fn(lambda model, rng, state, x: (mean_square(model(x)), state, {}))
    return step, state, pz.nx.ones({"batch": 8, "embedding": 16})


def test_a_length_that_changes_within_its_padding_is_noticed():
    was, now, whole = (pzs.ShardingLock.of(s, a, x=x) for s, a, x in map(padded_step, (29, 30, 32)))
    assert was.content.memory["parameters"] == now.content.memory["parameters"]
    report = pzs.ShardingLock.from_json(was.to_json()).check_lock(now)
    assert [str(each) for each in report.differences] == [
        "params/head.weights: was float32[16,29(32)], is now float32[16,30(32)]",
        "opt_state/0/trace/head.weights: was float32[16,29(32)], is now float32[16,30(32)]",
    ]
    report = now.check_lock(pzs.ShardingLock.from_json(whole.to_json()))
    said = [str(each) for each in report.differences]
    assert "params/head.weights: was float32[16,30(32)], is now float32[16,32]" in said


IN_A_PROCESS_OF_ITS_OWN = """
from tests.inspection import test_locks
step, state, x = test_locks.train_step()
print(test_locks.pzs.ShardingLock.of(step, state, x=x).to_json(), end="")
"""


def test_another_process_with_other_hashes_writes_the_same_bytes(of_train_step, tmp_path):
    root = pathlib.Path(pzs.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN],
        env=os.environ | {"PYTHONHASHSEED": "12", "PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert done.stdout == of_train_step.to_json().encode()


def test_nothing_in_a_lock_is_of_this_machine_or_this_run(of_train_step):
    text = of_train_step.to_json()
    assert os.getcwd() not in text
    assert not re.search(r"0x[0-9a-f]{6}|object at|pzs_layer|jit\(", text)
    without_versions = re.sub('"made_with": .*', "", text)
    assert not re.search(r"\d\.\d", without_versions)  # Figures are whole numbers.


def test_a_step_on_another_mesh_is_refused_by_name(base):
    step, args, kwargs = Job(on=pzs.make_mesh({"data": 2, "model": 4})).call()
    with pytest.raises(
        LockError, match=r"the lock is of \(data=4, model=2\), the step of \(data=2"
    ):
        base.lock.check(step, *args, **kwargs)


def test_a_lock_is_saved_in_place_and_loaded(base, of_train_step, tmp_path):
    path = tmp_path / "deep" / "lock.json"
    assert of_train_step.save(path) == path
    (usual := tmp_path / "usual").write_text("")
    assert path.stat().st_mode == usual.stat().st_mode
    assert base.lock.save(str(path)) == path
    assert [each.name for each in path.parent.iterdir()] == ["lock.json"]
    assert pzs.ShardingLock.load(path) == base.lock
    assert path.read_bytes() == base.lock.to_json().encode()
    assert repr(base.lock) == ("ShardingLock(5 arrays, 5 collectives, mesh (data=4, model=2), cpu)")


@pytest.mark.parametrize(("path", "called"), [(".", r"\."), ("", "an empty path")])
def test_a_lock_is_not_saved_in_the_place_of_a_folder(base, path, called):
    file = re.escape(repr(os.path.join(path, "lock.json")))
    with pytest.raises(
        RuleTypeError,
        match=rf"^{called} is a folder, and the lock is one file\. Give path={file}\.$",
    ):
        base.lock.save(path)


def test_a_file_that_is_not_a_lock_is_refused_with_its_path(base, tmp_path):
    path = tmp_path / "lock.json"
    with pytest.raises(LockError, match=rf"there is no sharding lock at {path}\. ShardingLock\.of"):
        pzs.ShardingLock.load(path)
    with pytest.raises(LockError, match=f"{tmp_path} cannot be read as a sharding lock: "):
        pzs.ShardingLock.load(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(LockError, match=f"{path} cannot be read as a sharding lock: .*utf-8"):
        pzs.ShardingLock.load(path)
    path.write_text(base.lock.to_json().replace('"count": 1', '"count": 0', 1))
    with pytest.raises(LockError, match=f"{path}: this sharding lock cannot be read:\n") as caught:
        pzs.ShardingLock.load(path)
    assert caught.value.problems == (
        "collectives entry 1: 'count' is 0. Write the lock anew instead of changing it.",
    )


def test_what_may_communicate_and_is_not_known_is_locked(base):
    step, args, kwargs = Job().call()
    program = compile_step(step, *args, **kwargs)
    text = """HloModule m
ENTRY e {
  p = f32[2]{0} parameter(0)
  ROOT c = f32[2]{0} custom-call(p), custom_call_target="mine"
}"""
    unknown = dataclasses.replace(program, module=Module.from_text(text))
    report = base.lock.check(unknown)
    said = [str(each) for each in report.differences if each.where == "not counted"]
    assert said == [
        "not counted: 0 became 1: a custom call of 'mine'; whether it moves data between devices "
        "is not known."
    ]
