"""Whose a collective is and what it moves, judged by sizes that only one layer has."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import (
    Jitted,
    TrainState,
    abstract_model,
    build_train_step_fn,
    data_parallel,
    fully_sharded,
    make_mesh,
    make_plan,
    tensor_parallel,
    train_state_sharding,
)
from penzai_shard.cli import demo
from penzai_shard.compiled_programs import Module, read_collectives
from penzai_shard.inspection.program_view import CompiledProgram, compile_step
from penzai_shard.inspection.steps.layer_scopes import LayerScopes
from penzai_shard.inspection.steps.lowered_steps import LoweredStep
from penzai_shard.inspection.steps.step_arrays import StepArray
from penzai_shard.inspection.traffic.attribution import attribute
from penzai_shard.inspection.traffic.collective_report import CollectiveReport
from penzai_shard.library_apis.compiler_api import ExecutableMemory
from tests.simulated_devices import users_fusions

MESH = make_mesh({"data": 4, "model": 2})
LAYOUTS = {
    "data parallel": data_parallel(),
    "FSDP": data_parallel() | fully_sharded(min_size=1024),
    "FSDP and tensor parallel": (
        data_parallel() | tensor_parallel() | fully_sharded(min_size=1024)
    ),
}


def attributed(program):
    operations = read_collectives(program.module, 8)
    return list(zip(operations, attribute(program, operations), strict=True))


def abstract(tree, shardings):
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def train_step_program(model, rules, loss_fn, optimizer, **inputs):
    state = TrainState.initial_state(model, optimizer, jax.random.key(0))
    state = abstract(state, train_state_sharding(state, MESH, rules))
    split = NamedSharding(MESH, PartitionSpec("data"))
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), inputs)
    step = build_train_step_fn(loss_fn, donate_params_and_state=True)
    return compile_step(step, state, **inputs)


# The demo


@pytest.fixture(scope="module")
def one_block():
    """The demo's second block has the collectives of the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "DECODER_BLOCKS", 1)
        yield


@pytest.fixture(scope="module", params=LAYOUTS)
def of_demo(request, one_block):
    """The layout's name, the demo's step, and its collectives with whose they are."""
    rules = LAYOUTS[request.param]
    plan = make_plan(abstract_model(demo.build_model, 0), MESH, rules, on_unnamed="replicate")
    model, _ = demo.with_constraints(plan.restore_structs(), MESH)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tokens = pz.nx.wrap(jnp.zeros((16, 65), jnp.int32), "batch", "seq")
    with users_fusions():  # Without, the gradient of a lookup is a loop that moves it in pieces.
        program = train_step_program(
            Jitted(model), rules, demo.next_byte_loss, optimizer, tokens=tokens
        )
    return request.param, program, attributed(program)


def test_every_collective_of_the_demo_has_owners_and_a_phase(of_demo):
    name, program, found = of_demo
    # The exact number is the compiler's business.
    assert (len(found) == 1) if name == "data parallel" else (20 <= len(found) <= 35)
    layers = {*program.step.scopes.paths, "loss", "optimizer"}
    for _, whose in found:
        assert whose.layers
        assert set(whose.layers) <= layers
        assert whose.phase is not None
        assert "nothing" not in whose.reason


def test_gradients_in_the_demo_are_moved_once_and_by_the_layers_that_hold_the_parameters(of_demo):
    name, program, found = of_demo
    gradients = [
        move.removeprefix("gradient of ")
        for _, whose in found
        for move in whose.moves
        if move.startswith("gradient of params/")
    ]
    parameters = {a.path for a in program.step.arguments.values() if a.part == "parameters"}
    # Some arrays that split gradients go through two collectives.
    assert set(gradients) == parameters
    assert len(gradients) <= len(parameters) + 1
    for _, whose in found:
        for move in whose.moves:
            if move.startswith("gradient of params/"):
                label = move.removeprefix("gradient of params/")
                assert set(program.step.scopes.holders[label]) <= set(whose.layers)
                assert whose.phase == "backward"
    gathered = [m for _, whose in found for m in whose.moves if m.startswith("params/")]
    split = {
        array.path
        for array in program.step.arguments.values()
        if array.part == "parameters" and "data" in jax.tree.leaves(tuple(array.spec))
    }
    # The table is split along the dimension that tokens do not index: what is looked up is moved.
    assert set(gathered) >= {path for path in split if "embeddings" not in path}
    assert (name == "data parallel") == (not split)


# A model in which each length belongs to one layer

LENGTHS = {"up": (8, 24), "middle": (24, 40), "down": (40, 56), "head": (56, 16)}


def towers(names=tuple(LENGTHS)):
    sublayers = []
    for name in names:
        into, out = LENGTHS[name]
        axes = {f"d{into}": into}, {f"d{out}": out}
        sublayers += [pz.nn.Linear.from_config(name, jax.random.key(0), *axes)]
        sublayers += [pz.nn.Elementwise(jnp.tanh)]
    return pz.nn.Sequential(sublayers)


def tower_loss(model, rng, state, x):
    return (model(x).untag("batch", "d16").unwrap() ** 2).mean(), state, {}


def tower_program(rules):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    x = pz.nx.wrap(jnp.zeros((12, 8)), "batch", "d8")
    return train_step_program(towers(), {"batch": "data", **rules}, tower_loss, optimizer, x=x)


def shapes_and_owners(program, phase):
    """What the collectives of a phase bring about, each with its one owner."""
    found = []
    for operation, whose in attributed(program):
        if whose.phase == phase:
            shapes = list(map(str, operation.results))
            owners = whose.layers * (len(shapes) if len(whose.layers) == 1 else 1)
            found += zip(shapes, owners, strict=True)
    return sorted(found)


UP, MIDDLE, DOWN, HEAD = (f"sublayers/{i}" for i in (0, 2, 4, 6))


@pytest.fixture(scope="module")
def tower():
    return tower_program({"d24": "model", "d56": "model"})


def test_owners_and_phases_are_those_that_follow_from_the_lengths(tower):
    # A layer that contracts a split length sums its output; one that makes a split length sums the
    # gradient of its input in the backward pass, but of the step's own input there is none.
    assert shapes_and_owners(tower, "forward") == [
        ("f32[3,16]", HEAD),
        ("f32[3,40]", MIDDLE),
    ]
    assert shapes_and_owners(tower, "backward") == [
        ("f32[12,8]", UP),
        ("f32[16,28]", HEAD),
        ("f32[28,40]", DOWN),
        ("f32[3,40]", DOWN),
        ("f32[40,12]", MIDDLE),
    ]
    assert shapes_and_owners(tower, "optimizer") == [("f32[]", "optimizer")] * 4


def test_what_is_moved_follows_from_the_lengths(tower):
    moves = {move for _, whose in attributed(tower) for move in whose.moves}
    assert moves == {
        "activation f32[3,16] of head",
        "activation f32[3,40] of middle",
        "gradient of activation f32[3,40] of down",
        *(f"gradient of params/{name}.weights" for name in LENGTHS),
    }


def test_reports_write_paths_in_place_of_marks(tower):
    names = [name for one in CollectiveReport.of(tower).collectives for name in one.op_names]
    assert any(f"/jvp({HEAD})/" in name or f"/{HEAD}/" in name for name in names)
    assert not any("pzs_layer" in name for name in names)


def test_what_a_rule_does_not_split_any_more_vanishes_from_its_layers_alone(tower):
    less = tower_program({"d24": "model"})
    assert shapes_and_owners(less, "forward") == [("f32[3,40]", MIDDLE)]
    assert shapes_and_owners(less, "backward") == [
        ("f32[12,8]", UP),
        ("f32[16,56]", HEAD),
        ("f32[40,12]", MIDDLE),
        ("f32[56,40]", DOWN),
    ]
    assert shapes_and_owners(less, "optimizer") == [("f32[]", "optimizer")] * 2


def test_a_step_without_gradients_is_a_forward_pass(tower):
    x = pz.nx.wrap(jnp.zeros((12, 8)), "batch", "d8")
    rules = {"batch": "data", "d24": "model", "d56": "model"}
    model = make_plan(towers(), MESH, rules).restore_structs()
    split = NamedSharding(MESH, PartitionSpec("data"))
    x = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), x)
    forward = compile_step(lambda model, x: model(x), model, x)
    assert shapes_and_owners(forward, "forward") == shapes_and_owners(tower, "forward")
    assert len(attributed(forward)) == 2


# Steps that users write themselves


def step_of_users(gradient_of, optimizer):
    def step(params, opt_state, x):
        loss, grads = jax.value_and_grad(gradient_of)(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        # A norm for a log is not the optimizer's.
        logged = optax.tree.norm(jax.tree.map(jnp.sin, grads))
        return optax.apply_updates(params, updates), opt_state, (loss, logged)

    return jax.jit(step, donate_argnums=(0, 1))


def split(tree, spec_of):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, spec_of(x))),
        tree,
    )


def test_a_step_of_users_with_layers_has_owners_too_and_the_optimizers_by_its_lines(tower):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    plan = make_plan(towers(), MESH, {"d24": "model", "d56": "model"})
    model = pz.freeze_variables(plan.restore_structs())
    step = step_of_users(lambda m, x: tower_loss(m, None, None, x)[0], optimizer)
    # What the optimizer keeps has the form of the model, and is marked alike.
    opt_state = split(jax.eval_shape(optimizer.init, model), lambda x: PartitionSpec())
    x = split(pz.nx.wrap(jnp.zeros((12, 8)), "batch", "d8"), lambda x: PartitionSpec("data"))
    program = compile_step(step, model, opt_state, x)
    assert program.step.notes == ()
    assert shapes_and_owners(program, "forward") == shapes_and_owners(tower, "forward")
    *of_model, last = [whose for _, whose in attributed(program)]
    assert {move for whose in of_model for move in whose.moves if "weights" in move} == {
        f"gradient of params/{name}.weights" for name in LENGTHS
    }
    assert of_model[-1].layers[-1] == "loss"
    assert last.layers == ("optimizer",)
    assert last.reason == (
        "by the lines of optax that it is from; of 4 of its 8 arrays nothing tells whose it is"
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(16, name="down")(jnp.tanh(nn.Dense(24, name="up")(x)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(40, name="head")(nn.remat(Block)(name="block")(x))


def test_modules_of_flax_go_by_the_paths_of_their_arrays():
    x = jnp.zeros((12, 16))
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    # Up and head by columns, down by rows.
    by_shape = {
        (16, 24): PartitionSpec(None, "model"),
        (24, 16): PartitionSpec("model"),
        (16, 40): PartitionSpec(None, "model"),
    }
    params = split(params, lambda x: by_shape.get(x.shape, PartitionSpec()))
    optimizer = optax.adam(1e-3)
    opt_state = split(jax.eval_shape(optimizer.init, params), lambda x: PartitionSpec())
    step = step_of_users(lambda p, x: (Net().apply(p, x) ** 2).mean(), optimizer)
    program = compile_step(step, params, opt_state, split(x, lambda x: PartitionSpec("data")))
    assert ("f32[3,16]", "params/params/block/down") in shapes_and_owners(program, "forward")
    (passed_back,) = (
        whose.layers
        for operation, whose in attributed(program)
        if whose.phase == "backward" and str(operation.results[0]) == "f32[3,16]"
    )
    assert "params/params/head" in passed_back
    moves = {move for _, whose in attributed(program) for move in whose.moves}
    assert {move for move in moves if "gradient of params" in move} == {
        f"gradient of params/params/{layer}/{name}"
        for layer in ("block/up", "block/down", "head")
        for name in ("kernel", "bias")
    }


# Programs written by hand, in which a wrong answer would be easy

FLOATS = "f32[8]{0}"


def written(body, arguments=(), results=(), partitions=8, **scopes):
    """A program of a text; ``%`` stands for the attributes that a collective over all has."""
    body = body.replace("%", "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}")
    body = re.sub(r"@(\S+)", r'metadata={op_name="\1"}', body).replace("f32[8]", FLOATS)
    text = (
        f"HloModule m, num_partitions={partitions}\n"
        "add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] add(a, b) }\n"
        "ENTRY e {\n" + body + "\n}"
    )
    scopes.setdefault("paths", ["one", "two", "two/inner"])
    step = LoweredStep(
        None,
        MESH,
        {
            name: StepArray(path, part, (8,), jnp.dtype("float32"), None)
            for name, path, part in arguments
        },
        tuple(StepArray(path, part, (8,), jnp.dtype("float32"), None) for path, part in results),
        LayerScopes(**scopes),
    )
    program = CompiledProgram(step, Module.from_text(text), ExecutableMemory(0, 0, 0, 0, 0), "cpu")
    ((_, whose),) = attributed(program)
    return whose


W = ("w", "params/w", "parameters")
V = ("v", "params/v", "parameters")
ONE, TWO, INNER = "pzs_layer_0", "pzs_layer_1", "pzs_layer_2"


def reduced(name, more=""):
    """The sum of a product."""
    return written(
        f"""x = f32[8] parameter(0), @x
        y = f32[8] multiply(x, x)
        {more}
        ROOT s = f32[8] all-reduce(y), %, to_apply=add, @{name}"""
    )


@pytest.mark.parametrize(
    ("name", "layers", "phase"),
    [
        (f"jit(f)/{ONE}/add", ("one",), "forward"),
        (f"jit(f)/{TWO}/{INNER}/add", ("two/inner",), "forward"),
        (f"jit(f)/jvp({TWO})/while/body/{INNER}/add", ("two/inner",), "forward"),
        (f"jit(f)/transpose(jvp({TWO}))/vmap({INNER})/add", ("two/inner",), "backward"),
        (f"jit(f)/transpose(jvp({ONE}))/jvp({ONE})/checkpoint/mul", ("one",), "backward"),
        (f"jit(f)/jvp({ONE})/checkpoint/mul", ("one",), "forward"),
        (f"jit(f)/{ONE}/checkpoint/rematted_computation/mul", ("one",), "backward"),
        # A gradient taken inside of a forward pass is a part of it.
        (f"jit(f)/jvp({TWO})/transpose(jvp({INNER}))/mul", ("two/inner",), "forward"),
        # A primitive and functions of these names are no transformations.
        (f"jit(transpose)/jvp({ONE})/transpose", ("one",), "forward"),
        (f"jit(f)/jvp({ONE})/jit(jvp)/add", ("one",), "forward"),
        # A function step has no scopes of its own: these are the user's.
        ("jit(f)/jvp(loss)/add", (), "forward"),
        ("jit(f)/optimizer/add", (), "forward"),
        ("jit(f)/reduce_sum", (), "forward"),
        ("x", (), "forward"),
    ],
)
def test_names_say_the_innermost_layer_and_the_outermost_differentiation(name, layers, phase):
    whose = reduced(name)
    assert (whose.layers, whose.phase) == (layers, phase)
    assert bool(whose.layers) == (whose.reason != "nothing tells whose it is")


@pytest.mark.parametrize(
    ("name", "layers", "phase"),
    [
        ("jit(train_step)/jvp(loss)/optimizer/add", ("loss",), "forward"),
        ("jit(train_step)/transpose(jvp(loss))/loss/mul", ("loss",), "backward"),
        ("jit(train_step)/while/body/jvp(loss)/add", ("loss",), "forward"),
        ("jit(train_step)/jit(optimizer)/jvp(loss)/add", ("loss",), "forward"),
        (f"jit(train_step)/jvp(loss)/{ONE}/loss/add", ("one",), "forward"),
        ("jit(train_step)/optimizer/cond/branch_1_fun/mul", ("optimizer",), "optimizer"),
        # A search along a line evaluates the model inside of the optimizer.
        (f"jit(train_step)/optimizer/jvp(loss)/{ONE}/mul", ("one",), "optimizer"),
        ("jit(train_step)/add", (), None),
    ],
)
def test_scopes_of_a_train_step_are_those_that_it_wrote_itself(name, layers, phase):
    whose = written(
        f"""x = f32[8] parameter(0), @x
        y = f32[8] multiply(x, x), @jit(train_step)/transpose(jvp(loss))/mul
        z = f32[8] add(x, y)
        ROOT s = f32[8] all-reduce(z), %, to_apply=add, @{name}""",
        of_step=("loss", "optimizer"),
    )
    assert (whose.layers, whose.phase) == (layers, phase)


def merged(name, second=f"@jit(f)/{TWO}/mul"):
    return written(
        f"""x = f32[8] parameter(0), @x
        a = f32[8] multiply(x, x), @jit(f)/{ONE}/mul
        b = f32[8] add(x, x), {second}
        ROOT s = (f32[8], f32[8]) all-reduce(a, b), %, to_apply=add, @{name}"""
    )


def test_merged_collectives_belong_to_the_layers_of_all_that_was_merged():
    whose = merged(f"jit(f)/({ONE}/mul:{TWO}/mul)")
    assert (whose.layers, whose.reason) == (("one", "two"), "by its name")


def test_one_name_of_several_merged_operations_does_not_speak_for_the_others():
    assert merged(f"jit(f)/{ONE}/mul").layers == ("one", "two")
    whose = merged(f"jit(f)/{ONE}/mul", "frontend_attributes={}")
    assert whose.layers == ("one",)
    assert whose.reason == ("by what computes it; of 1 of its 2 arrays nothing tells whose it is")


def gathered(of, more="", users=ONE, **options):
    """An unnamed gather of a value, used by layers."""
    names = users.split()
    uses = "\n".join(
        f"use{i} = f32[64]{{0}} negate(g), @jit(f)/{n}/neg" for i, n in enumerate(names)
    )
    roots = ", ".join(f"use{i}" for i in range(len(names)))
    types = ", ".join("f32[64]{0}" for _ in names)
    return written(
        f"""w = f32[8] parameter(0), @w
        v = f32[8] parameter(1), @v
        {more}
        g = f32[64]{{0}} all-gather({of}), %, dimensions={{0}}, use_global_device_ids=true
        {uses}
        ROOT t = ({types}) tuple({roots})""",
        [W, V],
        **options,
    )


def test_a_gather_without_a_name_belongs_to_its_only_user():
    whose = gathered("c", "c = f32[8] multiply(w, w)")
    assert whose.layers == ("one",)
    assert whose.reason == "by what uses it"
    assert whose.moves == ()


def test_a_gather_runs_in_the_phase_of_its_first_user():
    holders = {"w": {"one": None}}
    forward, backward = f"jvp({ONE})", f"transpose(jvp({ONE}))"
    assert gathered("w", users=f"{backward} {forward}", holders=holders).phase == "forward"
    assert gathered("w", users=f"{backward} {backward}", holders=holders).phase == "backward"
    assert gathered("w", users=f"{backward} {TWO}", holders=holders).phase is None


def test_a_gather_without_a_name_is_nobodys_if_its_users_disagree():
    assert gathered("c", "c = f32[8] multiply(w, w)", users=f"{ONE} {TWO}").layers == ()


def test_a_gathered_parameter_is_named_however_it_was_cut_and_cast():
    more = """h = bf16[8]{0} convert(w)
        c = bf16[8]{0} copy(h)
        r = bf16[8]{0} reshape(c)
        b = f32[8] convert(r)"""
    assert gathered("b", more).moves == ("params/w",)


def test_a_parameter_that_two_layers_hold_belongs_to_both():
    whose = gathered("w", users=f"{ONE} {TWO}", holders={"w": {"one": None, "two/inner": None}})
    assert (whose.layers, whose.moves) == (("one", "two/inner"), ("params/w",))
    assert whose.reason == "by the parameter that it moves"


def test_a_gather_for_two_layers_that_hold_a_parameter_belongs_to_both_though_named_by_one():
    def whose(users):
        return written(
            f"""w = f32[8] parameter(0), @w
            g = f32[64]{{0}} all-gather(w), %, dimensions={{0}}, \
                use_global_device_ids=true, @jit(f)/{ONE}/mul
            a = f32[64]{{0}} negate(g), @jit(f)/{ONE}/neg
            b = f32[64]{{0}} cosine(g), @jit(f)/{users}/cos
            ROOT t = (f32[64]{{0}}, f32[64]{{0}}) tuple(a, b)""",
            [W],
            holders={"w": {"one": None, "two/inner": None}},
        ).layers

    assert whose(f"{TWO}/{INNER}") == ("one", "two/inner")
    # Layer two does not hold it, and uses what layer one gives.
    assert whose(TWO) == ("one",)


def test_a_gather_in_an_outer_layer_belongs_to_the_layer_in_it_that_holds_the_parameter():
    holders = {"w": {"two/inner": None}}
    assert gathered("w", users=TWO, holders=holders).layers == ("two/inner",)
    assert gathered("w", users=ONE, holders=holders).layers == ("one",)


def test_what_is_computed_from_a_parameter_or_joined_with_another_is_not_that_parameter():
    for more in (
        "c = f32[8] multiply(w, v)",
        "h = f32[4]{0} slice(w), slice={[0:4]}\nk = f32[4]{0} slice(v), slice={[0:4]}\n"
        "c = f32[8] concatenate(h, k), dimensions={0}",
        "h = f32[4]{0} slice(w), slice={[0:4]}\nk = f32[4]{0} exponential(h)\n"
        "c = f32[8] concatenate(h, k), dimensions={0}",
    ):
        assert gathered("c", more).moves == ()


def test_a_name_that_could_be_that_of_two_arguments_is_of_none():
    whose = written(
        """w = f32[8] parameter(0), @w
        v = f32[8] parameter(1), @v
        ROOT g = f32[64]{0} all-gather(w), %, dimensions={0}, use_global_device_ids=true""",
        [("w", "teacher/w", "parameters"), ("v", "student/w", "parameters")],
        holders={"w": {"one": None}},
    )
    assert (whose.layers, whose.moves) == ((), ("teacher/w",))


def updated(new, results, name=f"@jit(f)/transpose(jvp({ONE}))/mul", root="n"):
    """A sum that two parameters may be updated by."""
    return written(
        f"""w = f32[8] parameter(0), @w
        v = f32[8] parameter(1), @v
        y = f32[8] cosine(v), @jit(f)/transpose(jvp({ONE}))/mul
        s = f32[8] all-reduce(y), %, to_apply=add, {name}
        {new}
        ROOT t = ({", ".join(["f32[8]"] * len(root.split(",")))}) tuple({root})""",
        [W, V],
        results,
    )


NEW_W = "n = f32[8] subtract(w, s)"


def test_a_sum_that_updates_a_parameter_is_its_gradient():
    whose = updated(NEW_W, [("result/w", "outputs")])
    assert (whose.layers, whose.phase) == (("one",), "backward")
    assert whose.moves == ("gradient of params/w",)


def test_a_sum_that_updates_two_parameters_is_the_gradient_of_neither():
    both = f"{NEW_W}\nm = f32[8] subtract(v, s)"
    results = [("result/w", "outputs"), ("result/v", "outputs")]
    assert updated(both, results, root="n, m").moves == ()
    # Nor is one that a result is computed from, which is a new value of neither.
    mixed = "k = f32[8] add(w, v)\nn = f32[8] subtract(k, s)"
    assert updated(mixed, [("result/w", "outputs")]).moves == ()


def test_results_that_are_left_out_of_a_program_leave_open_which_are_there():
    results = [("result/w", "outputs"), ("result/v", "outputs")]
    assert updated(NEW_W, results).moves == ()


def test_a_sum_in_the_forward_pass_is_no_gradient():
    whose = updated(NEW_W, [("result/w", "outputs")], name=f"@jit(f)/jvp({ONE})/mul")
    assert whose.moves == ()
    assert whose.phase == "forward"


BETWEEN_SLICES = (
    '_xla_host_transfer_rendezvous="psum_0",_xla_megascale_target="{1,2}x{0:3}",'
    '_xla_megascale_transfer_type="ALL_GATHER"'
)


def test_what_goes_between_slices_has_owners_though_it_has_no_name():
    whose = written(
        f"""w = f32[8] parameter(0), @w
        t = token[] after-all()
        s = (f32[8], u32[], token[]) send(w, t), channel_id=2, is_host_transfer=true,
          frontend_attributes={{{BETWEEN_SLICES}}}
        r = (f32[16]{{0}}, u32[], token[]) recv(t), channel_id=1, is_host_transfer=true,
          frontend_attributes={{{BETWEEN_SLICES}}}
        sd = token[] send-done(s), channel_id=2, is_host_transfer=true
        rd = (f32[16]{{0}}, token[]) recv-done(r), channel_id=1, is_host_transfer=true
        g = f32[16]{{0}} get-tuple-element(rd), index=0
        ROOT y = f32[16]{{0}} multiply(g, g), @jit(f)/transpose(jvp({ONE}))/mul""",
        [W],
        partitions=4,
    )
    assert (whose.layers, whose.phase, whose.moves) == (("one",), "backward", ("params/w",))
