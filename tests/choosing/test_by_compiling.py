"""Candidates priced by their compiled steps: exact where the program is, in order, and ended."""

import dataclasses
import functools
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from penzai_shard import Layout
from penzai_shard.choosing.by_compiling import CompiledPrices
from penzai_shard.choosing.by_compiling import compiled_prices as prices_module
from penzai_shard.choosing.by_compiling.compiled_costs import cost_of, extrapolated
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.search import Search
from penzai_shard.choosing.choices.stages import Compiling
from penzai_shard.choosing.shallow_models import Shallow
from penzai_shard.choosing.step_costs import Sent, StepCost
from penzai_shard.choosing.step_times import StepTime
from penzai_shard.compiled_programs import Module
from penzai_shard.compiled_programs.matrix_products import product_flops
from penzai_shard.errors import ShardingError
from penzai_shard.inspection.devices.absent_devices import CompilerProcess, TooLargeError
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.inspection.steps.lowered_steps import lower_step
from penzai_shard.inspection.steps.programs import StepProgram
from penzai_shard.library_apis.compiler_api import FOR_PRICES_ON_CPUS, bytecode_of
from penzai_shard.named_arrays import named_array
from penzai_shard.planning import without_names
from tests.choosing.fake_stages import FakeStage
from tests.choosing.small_problems import llama, problem_of

pytestmark = pytest.mark.long  # What they share takes long.
BLOCKS = 4
MESH = (("data", 4), ("model", 2))
SPLIT = {"embedding": "data", "neurons": "model", "head_groups": "model", "vocabulary": "model"}
LAYOUTS = {
    "all over data": Layout(parameters={"embedding": "data"}, compute={"batch": "data"}),
    "over both, again": Layout(
        parameters=SPLIT,
        compute={k: v for k, v in SPLIT.items() if k != "embedding"} | {"batch": "data"},
        rematerialise="nothing",
    ),
}
# A rule that splits the heads over more devices than there are heads.
IMPOSSIBLE = Layout(parameters={"head_groups": ("data", "model")}, compute={"batch": "data"})


@pytest.fixture(scope="module")
def problem():
    return problem_of(llama(BLOCKS))


@pytest.fixture(scope="module")
def prices(problem):
    with CompiledPrices(problem) as prices:
        workers = prices._workers_of(Topology("cpu:8"))
        # What is one program, such as that of one block, is compiled once.
        workers.compiling = functools.cache(workers.compiling)
        yield prices
        processes = [each._process for each in workers._all]
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.poll() is not None for process in processes)


@pytest.fixture(scope="module")
def prices_of(prices):
    """Prices of another problem, compiled in the processes that run already."""

    def of(problem, cut=None):
        others = CompiledPrices(problem, cut=cut)
        others._running.update(prices._running)
        return others

    return of


@pytest.fixture(scope="module")
def priced(prices):
    candidates = [Candidate(MESH, layout) for layout in (*LAYOUTS.values(), IMPOSSIBLE)]
    return dict(zip((*LAYOUTS, "impossible"), prices.costs(candidates), strict=True))


@pytest.fixture(scope="module")
def whole(problem, prices_of):
    """The same from the programs of all blocks, in the leaner of two orders of instructions."""
    # Twice the same program adds nothing from one to two, and is taken for one that was cut.
    prices = prices_of(problem, Shallow((problem, problem), 1))
    found = prices.costs([Candidate(MESH, layout) for layout in LAYOUTS.values()])
    return dict(zip(LAYOUTS, found, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_and_two_blocks_give_the_cost_of_all_of_them(priced, whole, name):
    cost, of_all = priced[name], whole[name]
    assert cost.flops == of_all.flops
    assert cost.traffic == pytest.approx(of_all.traffic, rel=1e-12)
    assert sum(cost.traffic.values()) > 0
    exact = ("parameters", "optimizer", "inputs")
    assert [cost.memory[key] for key in exact] == [of_all.memory[key] for key in exact]
    assert cost.memory["activations"] == pytest.approx(of_all.memory["activations"], rel=0.05)
    assert {line.reason for line in cost.sent} == {line.reason for line in of_all.sent}


def test_a_deep_model_is_compiled_whole_where_that_is_asked_for(prices, whole):
    assert prices.are_extrapolated
    (cost,) = prices.costs([Candidate(MESH, LAYOUTS["over both, again"])], whole=True)
    of_all = whole["over both, again"]
    assert (cost.flops, cost.traffic) == (of_all.flops, of_all.traffic)
    assert cost.memory == of_all.memory


def test_what_one_block_and_two_say_to_fit_is_not_picked_if_all_blocks_do_not(prices_of):
    """The second of a few blocks adds less than each later one: 9 % less, with microbatches."""
    model = llama(6, embedding_dim=64, mlp_hidden_dim=256, projection_dim=16, vocab_size=512)
    problem = problem_of(model, batch=16, seq=64)
    prices = prices_of(problem)
    stage = Compiling(problem, None, lambda: prices._cut)
    stage._prices = prices
    layout = dataclasses.replace(
        LAYOUTS["over both, again"],
        between_blocks={"batch": "data", "seq": "model"},
        rematerialise=None,
    )
    candidates = [Candidate(MESH, layout, microbatches=2)]
    (quick,) = prices.costs(candidates)
    limit = round(quick.memory_bytes + 0.0525 * quick.memory["activations"])
    choose = Search(limit, lambda *_: StepTime(1.0, 1.0, {}), {"compiled": 1}, lambda *_: None)
    names = FakeStage("names", lambda one: quick)
    found = choose.run(candidates, [names, stage])
    (priced,) = found.priced["compiled"]
    assert quick.memory_bytes < limit < priced.memory
    assert found.ranked(limit) == []
    assert priced.cost.memory["activations"] == pytest.approx(
        1.06 * quick.memory["activations"], rel=0.01
    )


def test_a_step_that_is_compiled_whole_holds_what_its_compiler_says(problem, prices_of, whole):
    prices = prices_of(problem, Shallow((problem,), 1))
    (cost,) = prices.costs([Candidate(MESH, LAYOUTS["over both, again"])])
    # Compilers for CPUs gather the parameters of all blocks at once.
    assert cost.memory["activations"] > 2 * whole["over both, again"].memory["activations"]
    assert cost.traffic == whole["over both, again"].traffic


def products_of_a_llama(batch, seq, blocks, again):
    """Operations of all devices by hand: heads of 8, 4 queries, 2 keys, 32 wide, 64 neurons."""
    tokens, width, queries, keys = batch * seq, 32, 4 * 8, 2 * 8
    weights = width * (2 * queries + 2 * keys + 3 * 64)
    attention = 2 * tokens * seq * queries
    block = tokens * weights + attention
    logits = tokens * width * 128
    # Forward once, backward twice; a block that is computed again leaves out its last product.
    block_times = 3 * block + (block - tokens * 64 * width if again else 0)
    return 2 * (blocks * block_times + 3 * logits)


@pytest.mark.parametrize("name", LAYOUTS)
def test_flops_are_those_of_the_products_of_the_model(priced, name):
    by_hand = products_of_a_llama(16, 32, BLOCKS, again="again" in name)
    # What no rule splits over a mesh axis is computed along all of it.
    parts = 8 if "both" in name else 4
    assert priced[name].flops * parts == by_hand


def test_what_is_sent_says_what_and_where_and_over_which_mesh_axes(priced):
    lines = priced["all over data"].sent
    (gathered,) = [
        line
        for line in lines
        if line.what == "parameter" and line.where == "transformer/block_*/mlp/gating_linear"
    ]
    assert gathered.names == ("embedding", "neurons")
    assert gathered.mesh_axes == ("data",)
    # Three of four parts of 32 x 64 floats, in each block, at least once.
    assert gathered.bytes >= BLOCKS * 3 / 4 * 32 * 64 * 4
    (gradient,) = [
        line
        for line in lines
        if line.what == "gradient" and line.where == "transformer/block_*/mlp/gating_linear"
    ]
    assert gradient.names == ("embedding", "neurons")
    activations = [line for line in priced["over both, again"].sent if line.what == "activation"]
    assert any(line.mesh_axes == ("model",) for line in activations)
    # What layers pass on to each other is not the gradient of the table that it ends in.
    tables = {line.where for lines in priced_lines(priced) for line in lines}
    assert tables <= {"transformer/embedder", "transformer/lm_head"}


def test_of_a_function_without_layers_gradients_are_told_from_what_is_passed_on():
    def loss_fn(model, rng, state, tokens):
        model, tokens = without_names((model, tokens))
        x = model["table"][tokens]
        for w in (model["first"], model["second"]):
            x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
        return (x**2).mean(), state, {}

    def weight(shape, *names):
        return named_array(jax.ShapeDtypeStruct(shape, "float32"), names)

    layer = {
        "up": weight((32, 64), "embedding", "neurons"),
        "down": weight((64, 32), "neurons", "embedding"),
    }
    table = weight((40, 32), "vocabulary", "embedding")
    problem = problem_of({"table": table, "first": layer, "second": layer}, loss_fn, 16, 12)
    layout = Layout(
        parameters={"neurons": "model"}, compute={"batch": "data", "neurons": "model"}, blocks=()
    )
    with CompiledPrices(problem) as prices:
        (cost,) = prices.costs([Candidate(MESH, layout)])
    sent = {(line.what, line.where, line.names, line.mesh_axes): line.bytes for line in cost.sent}
    gradients = {
        names: bytes_ for (what, _, names, _), bytes_ in sent.items() if what == "gradient"
    }
    # In a ring of four 3/2 of what is summed: a table of 40 x 32, and two halves of 32 x 64 each.
    assert gradients == {
        ("vocabulary", "embedding"): 3 / 2 * 40 * 32 * 4,
        ("embedding", "neurons"): 2 * 3 / 2 * 32 * 32 * 4,
        ("neurons", "embedding"): 2 * 3 / 2 * 32 * 32 * 4,
    }
    # The first layer's inputs have a gradient too, which ends in the table: 4 x 12 x 32 floats in
    # each direction and layer.
    assert sent["activation", "", (), ("model",)] == 4 * 4 * 12 * 32 * 4
    assert {where for _, where, _, _ in sent} == {""}


def priced_lines(priced):
    """The gradients of what has a vocabulary."""
    for name in LAYOUTS:
        yield [
            line
            for line in priced[name].sent
            if line.what == "gradient" and "vocabulary" in line.names
        ]


def test_what_is_computed_again_is_not_kept(priced):
    kept, again = (priced[name].memory["activations"] for name in LAYOUTS)
    assert again < 0.6 * kept


def test_a_candidate_that_cannot_be_laid_out_is_an_error_in_its_place(priced):
    assert isinstance(priced["impossible"], ShardingError)
    assert "'head_groups' (2) does not divide" in str(priced["impossible"])


def test_what_is_compiled_quickly_computes_and_sends_what_users_compile(prices):
    mesh = AbstractMesh((4, 2), ("data", "model"))
    step, state, inputs = prices._problems[0].built(LAYOUTS["over both, again"], mesh)
    lowered = lower_step(step, (state,), inputs)
    bytecode = bytecode_of(lowered.lowered)
    with CompilerProcess(Topology("cpu:8")) as process:
        quick, users = (
            cost_of(StepProgram.of(lowered, elsewhere.compiled, elsewhere.device_kind))
            for elsewhere in (
                process.compile(bytecode, mesh, options) for options in (FOR_PRICES_ON_CPUS, None)
            )
        )
    assert quick.flops == users.flops
    assert quick.traffic == pytest.approx(users.traffic, rel=1e-12)
    for part in ("parameters", "optimizer", "inputs"):
        assert quick.memory[part] == users.memory[part]
    # Where it orders operations otherwise, that is by what they need.
    assert quick.memory["activations"] <= users.memory["activations"]


def test_costs_come_in_the_order_of_the_candidates_whatever_is_compiled_first(
    monkeypatch, problem, prices
):
    """The first program is the last to be compiled."""
    futures = []

    class Late:
        def __init__(self, topology, count):
            assert (topology.name, count) == ("cpu:8", 2)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def compiling(self, bytecode, mesh):
            futures.append(Future())
            if len(futures) == 4:
                for number, future in reversed(list(enumerate(futures))):
                    future.set_exception(too_large(1_000_000 * (number + 1)))
            return futures[-1]

    monkeypatch.setattr(prices_module, "CompilerWorkers", Late)
    with CompiledPrices(problem, cut=prices._cut) as prices:
        found = list(prices.costs([Candidate(MESH, layout) for layout in LAYOUTS.values()]))
    # Of one block and of two, and three times what is more.
    assert [round(cost.memory_bytes, -3) for cost in found] == [4_000_000, 6_000_000]


def too_large(needed):
    return TooLargeError("the program does not fit", needed, 1, "TPU v5 lite")


def test_what_does_not_fit_into_the_hardware_costs_its_memory_alone(monkeypatch):
    def compile_none(process, bytecode, mesh, options=None):
        raise too_large(3_000_000_000)

    monkeypatch.setattr(CompilerProcess, "compile", compile_none)
    with CompiledPrices(problem_of(llama(1)), workers=1) as prices:
        (cost,) = prices.costs([Candidate(MESH, LAYOUTS["all over data"])])
    assert (cost.flops, cost.sent) == (0.0, ())
    assert cost.memory_bytes == 3_000_000_000
    # The exact parts are known all the same.
    assert cost.memory["parameters"] > 0


def test_an_interruption_ends_the_processes_and_whoever_waits_for_them():
    processes, waiting = [], []

    def interrupted():
        with CompiledPrices(problem_of(llama(1))) as prices:
            candidate = Candidate(MESH, LAYOUTS["all over data"])
            waiting.extend(prices._started(candidate, prices._problems))
            processes.extend(each._process for each in prices._running["cpu:8"]._all)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [process.poll() for process in processes] == [-9, -9]
    assert all(future.done() for _, future in waiting)


def test_lines_that_the_compiler_gave_to_others_with_two_blocks_keep_their_sum():
    def cost(**bytes_):
        lines = (Sent("gradient", where, ("a",), ("data",), n) for where, n in bytes_.items())
        return StepCost(1.0, tuple(lines), {})

    found = extrapolated(cost(first=100.0), cost(second=180.0), 4)
    assert found.sent == (Sent("gradient", "", (), ("data",), 100.0 + 3 * 80.0),)
    same = extrapolated(cost(first=100.0, all=5.0), cost(first=150.0, all=5.0), 3)
    assert {line.where: line.bytes for line in same.sent} == {"first": 200.0, "all": 5.0}


def compiled_flops(function, *shapes):
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return product_flops(Module.from_text(jax.jit(function).lower(*structs).compile().as_text()))


def test_products_in_loops_count_as_often_as_they_run():
    def looped(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    assert compiled_flops(looped, (8, 16), (5, 16, 16)) == 5 * 2 * 8 * 16 * 16


def test_convolutions_count_where_the_window_is_over_the_image():
    def convolved(x, w):
        return jax.lax.conv_general_dilated(x, w, (2, 1), "SAME", rhs_dilation=(1, 2))

    # Rows: 4 results of 8, window 3: the last is half over padding; columns: 6, window 3 by 2.
    rows, columns = 4 * 3 - 1, 6 * 3 - 4
    flops = compiled_flops(convolved, (2, 3, 8, 6), (5, 3, 3, 3))
    assert flops == 2 * (2 * 5 * 3) * rows * columns


def test_convolutions_of_groups_count_what_each_group_computes():
    def convolved(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", feature_group_count=16)

    def of_kernel(x, w, y):
        return jax.vjp(lambda w: convolved(x, w), w)[1](y)[0]

    structs = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((8, 16, 9, 9), (16, 1, 3, 3), (8, 16, 7, 7))
    ]
    for function, given in ((convolved, structs[:2]), (of_kernel, structs)):
        # As it is lowered: compilers for CPUs write groups otherwise.
        program = jax.jit(function).lower(*given).as_text(dialect="hlo")
        assert product_flops(Module.from_text(program)) == 2 * 8 * 16 * 7 * 7 * 3 * 3


def test_products_that_compilers_for_tpus_write_as_convolutions_are_counted():
    """They have no window, as no dimension slides."""
    module = Module.from_text("""HloModule m

ENTRY main {
  a = f32[4,8] parameter(0)
  b = f32[8,16] parameter(1)
  ROOT c = f32[4,16] convolution(a, b), dim_labels=bf_io->bf
}""")
    assert product_flops(module) == 2 * 4 * 8 * 16


def test_products_in_bfloat16_are_neither_sent_nor_held_in_float32(priced, prices_of):
    halved = problem_of(llama(BLOCKS, parameter_dtype=jnp.bfloat16, activation_dtype=jnp.bfloat16))
    name = "over both, again"
    (cost,) = prices_of(halved).costs([Candidate(MESH, LAYOUTS[name])])
    assert cost.traffic["model",] < 0.55 * priced[name].traffic["model",]
    # Losses are computed in float32 all the same.
    assert cost.memory["activations"] < 0.75 * priced[name].memory["activations"]


def test_memory_does_not_get_less_with_more_blocks():
    one, two = (StepCost(n, (), {"activations": held}) for n, held in ((1.0, 9.0), (2.0, 7.0)))
    assert extrapolated(one, two, 5) == StepCost(5.0, (), {"activations": 9.0})


def test_what_blocks_do_not_keep_is_not_held_for_their_gradients(prices_of):
    """Of many tokens, no block keeps more than what goes into it, one part over the heads."""
    prices = prices_of(problem_of(llama(3, num_kv_heads=4), batch=16, seq=256))
    layout, held = LAYOUTS["over both, again"], []
    started = prices._started(Candidate((("data", 2), ("model", 4)), layout), prices._problems)
    for blocks in (3, 11):
        held.append(prices._finished(started, blocks).memory["activations"])
    into_a_block = 16 // 2 * 256 * 32 * 4
    assert into_a_block <= (held[1] - held[0]) / 8 <= 1.25 * into_a_block
