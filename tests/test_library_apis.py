"""One test per assumption about what other libraries do not promise to keep.

A release that breaks one of them fails here, with the name of the assumption.
"""

import ast
import collections
import contextlib
import dataclasses
import datetime
import importlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.layout import Layout
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxlib.mlir.passmanager import PassManager
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1
from penzai.models.transformer.variants import llamalike_common
from treescope.external import jax_support

import penzai_shard
from penzai_shard.errors import PropagationError, ShardingError
from penzai_shard.library_apis import (
    compiler_api,
    compiler_process,
    jax_api,
    mesh_orders,
    orbax_api,
    penzai_api,
    penzai_converters,
    python_api,
    shardy_api,
    shardy_collectives,
    shardy_forms,
    treescope_api,
)
from penzai_shard.traced_programs import inner_programs
from tests.simulated_devices import UNFINISHED_ENTRY

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def traced(function, *arguments):
    return jax.make_jaxpr(function)(*arguments)


# JAX: arrays and pytrees


def test_arrays_of_a_traced_function_are_tracers():
    seen = []

    def function(x):
        seen.append((isinstance(x, jax_api.Tracer), isinstance(x, jax.Array)))
        return x

    jax.jit(function)(1.0)
    jax.grad(function)(1.0)
    jax.vmap(function)(jnp.ones(2))
    assert seen == [(True, True)] * 3
    assert not isinstance(jnp.ones(2), jax_api.Tracer)


def test_values_say_whether_they_are_weakly_typed():
    assert jax_api.is_weakly_typed(jnp.asarray(1.0))
    assert jax_api.is_weakly_typed(jax.typeof(jnp.asarray(1.0)))
    assert jax_api.is_weakly_typed(traced(lambda x: x, 1.0).jaxpr.invars[0].aval)
    assert not jax_api.is_weakly_typed(jnp.float32(1.0))
    assert not jax_api.is_weakly_typed(1.0)


def test_tracers_say_what_they_follow_outside_of_programs():
    seen = []

    def square(x):
        seen.append(jax_api.runs_at_once(x))
        return x * x

    array = jnp.ones(2)
    jax.grad(square)(1.0)
    jax.vmap(square)(array)
    jax.vmap(jax.grad(square))(array)
    jax.jvp(square, (1.0,), (1.0,))
    jax.linearize(square, 1.0)
    assert seen == [True] * 5
    seen.clear()
    jax.jit(square)(1.0)
    jax.grad(jax.jit(square))(1.0)
    jax.jit(jax.grad(square))(2.0)
    jax.jit(jax.vmap(square))(array)
    jax.grad(jax.checkpoint(square))(3.0)
    jax.eval_shape(square, array)
    jax.make_jaxpr(square)(1.0)
    assert seen == [False] * len(seen)
    assert len(seen) >= 5


def test_operations_that_change_form_alone_have_known_names():
    place = NamedSharding(MESH, PartitionSpec("data"))

    def function(x):
        x = jax.lax.with_sharding_constraint(x, place)
        x = jnp.copy(x).astype(jnp.bfloat16).T
        return jnp.broadcast_to(x.reshape(16)[None], (2, 16))

    program = traced(function, jnp.ones((8, 2)))
    found = [jax_api.changes_form_alone(equation.primitive) for equation in program.eqns]
    assert len(found) >= 5
    assert all(found)
    computing = traced(lambda x: jnp.sin(x) @ x, jnp.ones((2, 2)))
    assert not any(jax_api.changes_form_alone(equation.primitive) for equation in computing.eqns)


def test_arrays_that_share_memory_have_an_address_in_common():
    array = jax.device_put(jnp.ones((8, 2)), NamedSharding(MESH, PartitionSpec("data")))
    relabelled = jax.device_put(array, NamedSharding(MESH, PartitionSpec("data", None)))
    assert len(jax_api.memory_addresses(array)) == 8
    assert jax_api.memory_addresses(relabelled) == jax_api.memory_addresses(array)
    assert not jax_api.memory_addresses(jnp.copy(array)) & jax_api.memory_addresses(array)


@pytest.mark.parametrize("node", [{"b": 1, "a": 2}, [1, 2], (1, 2), pz.nn.Identity(), None])
def test_a_node_of_a_pytree_gives_its_children_and_a_leaf_gives_none(node):
    children, _ = jax_api.children_of_node(node)
    keyed, _ = jax_api.keyed_children_of_node(node)
    assert [child for _, child in keyed] == list(children)
    assert jax_api.children_of_node(1.0) is None
    fields = collections.namedtuple("fields", "a b")
    keyed, _ = jax_api.keyed_children_of_node(fields(1, 2))
    assert [(key.name, child) for key, child in keyed] == [("a", 1), ("b", 2)]
    assert jax_api.keyed_children_of_node(1.0) is None


def test_a_memory_layout_has_a_format():
    sharding = NamedSharding(MESH, PartitionSpec("data"))
    format_ = jax_api.Format(Layout((0, 1)), sharding)
    assert format_.sharding == sharding


# JAX: meshes and processes


def test_the_manual_mesh_axes_are_those_that_shard_map_took():
    seen = []

    def function(x):
        seen.append(jax_api.manual_mesh_axes())
        return x

    spec = PartitionSpec("data")
    mapped = jax.shard_map(function, mesh=MESH, in_specs=spec, out_specs=spec, axis_names={"data"})
    jax.jit(mapped)(jnp.ones(4))
    assert seen[-1] == {"data"}
    assert jax_api.manual_mesh_axes() == frozenset()


def test_messages_between_processes_need_the_coordination_service():
    """That they arrive is tested with several processes, in tests/processes."""
    with pytest.raises(ShardingError, match=r"Call jax\.distributed\.initialize\(\) first"):
        jax_api.send_message("key", "text")
    with pytest.raises(ShardingError, match="no coordination service"):
        jax_api.receive_message("key", 1.0)


def test_a_part_of_a_tree_in_treescope_may_have_a_style_and_a_text_on_hovering():
    class Styled:
        def __treescope_repr__(self, path, subtree_renderer):
            part = treescope.rendering_parts.text("shown")
            return treescope_api.StyledPart(part, "one two", ".one{color:red}", 'a "title"')

    page = treescope.render_to_html([Styled(), Styled()], compressed=False)
    element = '<span class="one two" title="a &quot;title&quot;">shown</span>'
    assert page.count(element) == 2
    assert page.count(".one{color:red}") == 1
    assert treescope.render_to_text([Styled()]) == "[shown]"


def test_treescope_and_penzai_read_arrays_through_the_functions_that_are_replaced(monkeypatch):
    """What they then give for arrays of several processes is tested in tests/processes."""
    names = ("faster_array_repr", "summarize_array_data", "get_array_data_with_truncation")
    owners = dict.fromkeys(names, jax_support) | {names[2]: jax_support.JAXArrayAdapter}
    for name, owner in owners.items():
        monkeypatch.setattr(owner, name, getattr(owner, name))
    treescope_api.show_own_parts()
    treescope_api.show_own_parts()
    read = collections.Counter()

    def counting(name, function):
        assert not hasattr(function.__wrapped__, "__wrapped__")
        return lambda *given, **named: read.update([name]) or function(*given, **named)

    for name, owner in owners.items():
        monkeypatch.setattr(owner, name, counting(name, getattr(owner, name)))
    for array in (jnp.ones((3, 40)), pz.nx.ones({"a": 3, "b": 40})):
        assert treescope.render_to_html(treescope.render_array(array))
        assert treescope.render_to_text(array)
    assert read == {names[0]: 2, names[1]: 3, names[2]: 2}


@pytest.mark.parametrize("options", ["UNOPTIMISED_COMPILATION", "LITTLE_OPTIMISED_COMPILATION"])
def test_a_program_compiles_with_options_of_the_compiler(options):
    lowered = jax.jit(lambda x: jnp.sin(x) * 2).lower(1.0)
    compiled = lowered.compile(compiler_options=getattr(jax_api, options))
    assert compiled(1.0) == pytest.approx(2 * jnp.sin(1.0))


# JAX: traced programs


def test_an_equation_says_where_it_comes_from():
    def called(x):
        with jax.named_scope("block"):
            return jnp.exp(x)

    (equation,) = traced(called, 1.0).eqns
    assert jax_api.scope_path(equation) == "block"
    frames = jax_api.source_frames(equation)
    own = [(name, line) for file, name, line in frames if file == __file__]
    name, line = own[0]
    assert name.endswith("called")
    assert line == called.__code__.co_firstlineno + 2


def test_a_transformed_equation_keeps_its_scope_inside_the_transformations_name():
    def called(x):
        with jax.named_scope("block"):
            return jnp.sin(x)

    found = {
        jax_api.scope_path(one) for one in traced(lambda x: jax.jvp(called, (x,), (x,)), 1.0).eqns
    }
    assert any("block" in path for path in found)


def test_programs_inside_an_equation_are_found_in_its_parameters():
    def looped(x):
        x = jax.lax.scan(lambda c, _: (c + 1, None), x, None, length=3)[0]
        x = jax.lax.cond(x > 0, lambda y: y, lambda y: -y, x)
        return jax.jit(lambda y: y * 2)(x)

    equations = traced(looped, 1.0).eqns
    counts = {one.primitive.name: len(list(inner_programs(one))) for one in equations}
    assert counts["scan"] == 1
    assert counts["cond"] == 2
    assert counts["jit"] == 1


def test_a_scan_says_how_many_inputs_are_constants_and_how_many_are_carried():
    def looped(x, y):
        def turn(carry, element):
            return {"a": carry["a"] + element * y, "b": carry["b"] + 1}, carry["a"] * x["c"]

        return jax.lax.scan(turn, {"a": x["a"], "b": x["b"]}, jnp.ones(3))

    program = traced(looped, {"a": 1.0, "b": 2.0, "c": 3.0}, 4.0)
    equation = next(one for one in program.eqns if one.primitive.name == "scan")
    assert jax_api.scan_counts(equation.params) == (2, 2)
    assert len(equation.invars) == 2 + 2 + 1


def test_a_program_can_be_taken_apart_and_put_together():
    closed = traced(lambda x: (jnp.sin(x) + 1.0, 2.0), 1.0)
    jaxpr = closed.jaxpr
    assert isinstance(closed, jax_api.ClosedJaxpr)
    assert isinstance(jaxpr, jax_api.Jaxpr)
    assert all(isinstance(one, jax_api.JaxprEqn) for one in jaxpr.eqns)
    assert any(isinstance(atom, jax_api.Literal) for one in jaxpr.eqns for atom in one.invars)
    assert all(isinstance(var, jax_api.Var) for var in jaxpr.invars)
    first = jaxpr.eqns[0]
    shorter = jax_api.Jaxpr((), jaxpr.invars, first.outvars, [first], debug_info=jaxpr.debug_info)
    function = jax_api.jaxpr_as_fun(jax_api.ClosedJaxpr(shorter, ()))
    assert function(1.0) == [jnp.sin(1.0)]


@pytest.mark.parametrize(
    ("kind", "chips", "mesh", "along_last"),
    [
        # As libtpu 0.0.42 describes the devices of "v5e:4x8", "v5p:4x4x4", "tpu7x:4x4x4", "v3:4x4".
        ("TPU v5 lite", (4, 8), (2, 4, 4), [[0, x, 0, 0] for x in range(4)]),
        ("TPU v5", (4, 4, 4), (16, 4), [[0, x, 0, 0, 0] for x in range(4)]),
        ("TPU7x", (4, 4, 4), (64, 2), [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]),
        ("TPU v3", (4, 4), (8, 4), [[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [0, 1, 0, 1]]),
    ],
)
def test_jax_lays_meshes_by_attributes_that_described_tpus_have(kind, chips, mesh, along_last):
    cores = 2 if kind in ("TPU7x", "TPU v3") else 1
    found = mesh_orders.positions_of_mesh(kind, chips, cores, mesh, (1,) * len(mesh))
    assert found[(0,) * (len(mesh) - 1)].tolist() == along_last
    assert len({tuple(each) for each in found.reshape(-1, found.shape[-1]).tolist()}) == math.prod(
        mesh
    )


def test_jax_does_not_split_an_axis_of_a_torus_over_two_mesh_axes_but_of_v5e():
    assert mesh_orders.positions_of_mesh("TPU v5", (4, 4, 4), 1, (32, 2), (1, 1)) is None
    assert mesh_orders.positions_of_mesh("TPU v5 lite", (4, 4), 1, (8, 2), (1, 1)) is not None


def test_mesh_axes_of_size_one_stay_in_what_jax_lowers_and_shardy_takes_others_in_their_place():
    automatic = (AxisType.Auto,) * 3
    mesh = AbstractMesh((1, 1, 2), ("rows:0", "columns:1", "rest"), axis_types=automatic)
    x, y = (
        jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=NamedSharding(mesh, spec))
        for spec in (PartitionSpec("rows:0"), PartitionSpec(None, "columns:1"))
    )
    lowered = jax.jit(jnp.dot).trace(x, y).lower(lowering_platforms=("cpu",))
    program = shardy_collectives.MarkedProgram(lowered)
    assert [mark.dimensions for mark in program.marks] == [(("rows:0",), ()), ((), ("columns:1",))]
    gathers = program.placed({"data": 2}, [((), ("data",)), ((), ("data",))])
    assert [each.kind for each in gathers.operations if each.mesh_axes] == ["sdy.all_gather"]
    reduces = program.placed({"data": 2, "model": 2}, [((), ("model",)), (("model",), ())])
    assert [(each.kind, each.mesh_axes) for each in reduces.operations if each.mesh_axes] == [
        ("sdy.all_reduce", ("model",))
    ]
    products = [each for each in reduces.operations if each.kind == "stablehlo.dot_general"]
    assert [each.contracted for each in products] == [(0,)]


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_product_gets_the_layout_of_xla_by_reshards_behind_it(in_a_loop):
    """Shardy alone would exchange the first operand and gather the second one."""
    automatic = (AxisType.Auto,) * 3
    mesh = AbstractMesh((1, 1, 2), ("rows", "summed", "rest"), axis_types=automatic)
    x, y = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (
            ((64, 8), PartitionSpec(None, "summed")),
            ((8, 64), PartitionSpec("summed")),
        )
    )
    by_rows = NamedSharding(mesh, PartitionSpec("rows"))

    def product(x, y):
        made = jnp.sin(jnp.dot(x, y))
        return x + jax.lax.with_sharding_constraint(made, by_rows)[:, :8]

    def looped(x, y):
        return jax.lax.scan(lambda x, _: (product(x, y), None), x, length=3)[0]

    traced_product = jax.jit(looped if in_a_loop else product).trace(x, y)
    program = shardy_collectives.MarkedProgram(traced_product.lower(lowering_platforms=("cpu",)))
    assert {axis for mark in program.marks for axes in mark.dimensions for axis in axes} == {
        "rows",
        "summed",
    }
    specs = [tuple(("data",) if axes else () for axes in mark.dimensions) for mark in program.marks]
    placed = program.placed({"data": 4}, specs)
    moved = [each for each in placed.operations if each.mesh_axes]
    behind = [each for each in moved if each.kind != "sdy.all_to_all"]
    assert [each.kind for each in behind] == ["sdy.all_reduce", "sdy.all_slice"]
    assert {each.times for each in behind} == {3 if in_a_loop else 1}


def test_shardy_keeps_the_layout_of_arguments_that_do_not_divide():
    mesh = AbstractMesh((1, 2), ("rows", "rest"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((5,), "float32", sharding=NamedSharding(mesh, PartitionSpec("rows")))
    lowered = jax.jit(jnp.sin).trace(x).lower(lowering_platforms=("cpu",))
    program = shardy_collectives.MarkedProgram(lowered)
    placed = program.placed({"data": 4}, [(("data",),) for _ in program.marks])
    assert placed.values[placed.arguments[0]].spec == (("data",),)
    assert not any(each.mesh_axes for each in placed.operations)


def test_dimensions_of_length_one_are_added_and_dropped_by_reshapes_and_not_by_broadcasts():
    def function(rows, columns, one):
        added = jax.lax.broadcast_in_dim(rows, (1, 4, 1), (1,))
        stretched = jax.lax.broadcast_in_dim(columns, (4, 5, 6), (0, 2))
        return added, stretched, one + stretched

    shapes = (4,), (1, 6), ()
    lowered = jax.jit(function).lower(*(jnp.ones(shape) for shape in shapes))
    module = lowered.compiler_ir("stablehlo").operation.clone()
    with module.context:
        shardy_forms.bring_to_form_of_xla(module)
        assert module.verify()
    text = str(module)
    assert re.findall(r"reshape .*: \((.*)\) -> (.*)", text) == [
        ("tensor<4xf32>", "tensor<1x4x1xf32>"),
        ("tensor<1x6xf32>", "tensor<6xf32>"),
    ]
    assert re.findall(r"broadcast_in_dim .*, (.*) : \((.*)\) -> (.*)", text) == [
        ("dims = [2]", "tensor<6xf32>", "tensor<4x5x6xf32>"),
        ("dims = []", "tensor<f32>", "tensor<4x5x6xf32>"),
    ]


def test_new_variables_of_a_program_take_the_type_of_others():
    (equation,) = traced(jnp.exp, jnp.ones((2, 3))).eqns
    variable = jax_api.Var(equation.outvars[0].aval)
    assert variable.aval.shape == (2, 3)
    assert variable != jax_api.Var(equation.outvars[0].aval)


# Penzai


@pytest.mark.parametrize("kind", [pz.StateVariable, pz.Parameter])
def test_a_variable_stores_its_value_as_it_is_given(kind):
    variable = kind(value=jnp.ones(2), label="a")
    array = jnp.zeros(3)
    penzai_api.store_value(variable, array)
    assert penzai_api.stored_values([variable])[0] is array
    assert variable.value is array
    assert variable.freeze().value is array


def test_effects_of_the_first_api_hold_what_they_hold_in_one_field():
    for (module, name), field in penzai_api.EFFECT_FIELDS.items():
        effects = importlib.import_module(f"penzai.deprecated.v1.data_effects.{module}")
        kind = getattr(effects, name)
        assert field in {one.name for one in dataclasses.fields(kind)}


LLAMALIKE = {
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 0,
    "vocab_size": 5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "hidden_act": "silu",
}


@pytest.fixture
def without_torch(monkeypatch):
    """A process in which importing torch or transformers fails."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "transformers", None)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_penzais_converter_of_llamas_takes_arrays_of_jax_and_a_configuration(dtype):
    names = ("model.embed_tokens.weight", "lm_head.weight")
    arrays = {name: jnp.ones((5, 4), dtype) for name in names}
    arrays["model.norm.weight"] = jnp.ones(4, dtype)
    model = penzai_converters.convert_llamalike(LLAMALIKE, arrays, dtype)
    _, parameters = pz.unbind_params(model)
    held = {id(p.value.data_array) for p in parameters}
    assert held == {id(array) for array in arrays.values()}
    assert model.metadata.activation_dtype == jnp.dtype(dtype)


@pytest.mark.usefixtures("without_torch")
def test_penzais_converter_of_gpt_neox_compares_classes_and_configurations_of_transformers():
    config = {**LLAMALIKE, "hidden_act": "gelu", "layer_norm_eps": 0.5}
    config |= {"rotary_emb_base": 100.0, "rotary_pct": 1.0}
    tables = ("gpt_neox.embed_in.weight", "embed_out.weight")
    norms = ("gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias")
    arrays = {name: jnp.ones((5, 4)) for name in tables} | {name: jnp.ones(4) for name in norms}
    model = penzai_converters.convert_gpt_neox(config, arrays, "float32")
    assert len(pz.unbind_params(model)[1]) == 4
    # With it the last norm, to which Penzai does not give the configuration's epsilon.
    (norm,) = pz.select(model).at_instances_of(pz.nn.Standardize).get_sequence()
    assert norm.epsilon == 1e-6


@pytest.mark.parametrize("gate_is_transposed", [False, True])
def test_penzais_converter_of_gemma_reads_its_sizes_from_a_table(gate_is_transposed):
    preset = {"num_decoder_blocks": 1, "vocab_size": 5, "num_kv_heads": 2}
    preset |= {"query_head_multiplier": 1, "embedding_dim": 4, "projection_dim": 2}
    preset |= {"mlp_hidden_dim": 6, "rms_norm_eps": 0.5}
    gate = jnp.stack([jnp.zeros((6, 4)), jnp.ones((6, 4))])
    arrays = {
        "embedder": {"input_embedding": jnp.ones((5, 4))},
        "final_norm": {"scale": jnp.zeros(4)},
        "layer_0/pre_attention_norm": {"scale": jnp.zeros(4)},
        "layer_0/pre_ffw_norm": {"scale": jnp.zeros(4)},
        "layer_0/mlp/gating_einsum": {"w": gate if gate_is_transposed else gate.swapaxes(1, 2)},
        "layer_0/mlp/linear": {"w": jnp.ones((6, 4))},
        "layer_0/attn/qkv_einsum": {"w": jnp.ones((3, 2, 4, 2))},
        "layer_0/attn/attn_vec_einsum": {"w": jnp.ones((2, 2, 4))},
    }
    model = penzai_converters.convert_gemma(preset, gate_is_transposed, arrays)
    parameters = {p.label: p.value for p in pz.unbind_params(model)[1]}
    gating = parameters["transformer/block_0/mlp/gating_linear.weights"]
    assert dict(gating.named_axes) == {"embedding": 4, "neurons": 6}
    assert not gating.unwrap("embedding", "neurons").any()
    assert (parameters["transformer/final_norm/scale.weights"].unwrap("embedding") == 1).all()
    norms = pz.select(model).at_instances_of(pz.nn.RMSLayerNorm)
    assert {float(norm.sublayers[0].epsilon) for norm in norms.get_sequence()} == {0.5}
    ropes = pz.select(model).at_instances_of(pz.nn.ApplyRoPE).get_sequence()
    assert {rope.max_wavelength for rope in ropes} == {10_000}


def test_a_copy_of_a_function_sees_other_globals_and_the_function_its_own():
    convert = llamalike_common.llamalike_from_huggingface_model
    copied = penzai_converters.with_globals(convert, jax=None)
    assert copied.__globals__["jax"] is None
    assert convert.__globals__["jax"] is jax
    assert copied.__defaults__ == convert.__defaults__


def test_side_outputs_of_the_first_api_go_to_a_list_that_can_be_shared():
    collected = []

    @pz_v1.pytree_dataclass
    class Reports(pz_v1.Layer):
        effect: pz_v1.de.SideOutputEffect = pz_v1.de.SideOutputRequest(tag="t")

        def __call__(self, x):
            destination = penzai_api.side_outputs(self.effect)
            assert isinstance(destination, list)
            penzai_api.share_side_outputs(self.effect, collected)
            self.effect.tell(x)
            penzai_api.share_side_outputs(self.effect, destination)
            return x

    handled = pz_v1.de.CollectingSideOutputs.handling(Reports())
    handled(jnp.ones(1))
    assert len(collected) == 1


# Orbax


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of ours, as far as Orbax knows: some arrays and other metadata."""
    directory = tmp_path_factory.mktemp("orbax") / "saved"
    arrays = {"a": jnp.arange(8.0), "b": jnp.ones((2, 3))}
    orbax_api.begin_save(str(directory), arrays, {"mine": {"kind": "test"}})()
    return directory


def struct(shape, dtype="float32"):
    sharding = NamedSharding(MESH, PartitionSpec(*("data",) * (shape == (8,))))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def test_orbax_reads_arrays_straight_into_shardings_and_leaves_out_what_is_none(saved):
    loaded = orbax_api.load(str(saved), {"a": struct((8,)), "b": None}, 2**20)
    assert loaded["b"] is None
    assert loaded["a"].tolist() == list(range(8))
    assert loaded["a"].sharding.spec == PartitionSpec("data")
    ocp = orbax_api.orbax()
    ocp.save(
        saved.parent / "nested", {"list": [jnp.ones(2), jnp.zeros(3)], "other": (jnp.ones(4),)}
    )
    wanted = {"list": [None, struct((3,))], "other": [None]}
    loaded = orbax_api.load(str(saved.parent / "nested"), wanted, 2**20)
    assert loaded["list"][1].tolist() == [0, 0, 0]
    assert jax.tree.leaves(loaded) == [loaded["list"][1]]


def test_orbax_has_copies_of_arrays_once_it_has_begun_to_write(tmp_path):
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    shardings = [NamedSharding(MESH, PartitionSpec(*axes)) for axes in (("data",), ())]
    arrays = {f"{n}": jax.device_put(jnp.zeros((8, 2)), s) for n, s in enumerate(shardings)}
    numbers = np.zeros(3)
    wait = orbax_api.begin_save(str(tmp_path / "saved"), {**arrays, "numbers": numbers}, {})
    arrays = {name: add(add(array)) for name, array in arrays.items()}
    numbers += 2
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    wanted = {name: struct((8, 2)) for name in arrays} | {"numbers": struct((3,))}
    loaded = orbax_api.load(str(tmp_path / "saved"), wanted, 2**20)
    assert all(not array.any() for array in loaded.values())
    assert all(bool(array.all()) for array in arrays.values())


def test_orbax_casts_while_it_reads(saved):
    loaded = orbax_api.load(str(saved), {"a": struct((8,), "bfloat16"), "b": None}, 2**20)
    assert loaded["a"].dtype == jnp.bfloat16


# Orbax leaves tasks of the failed read behind, which report themselves when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_orbax_fails_where_a_piece_is_larger_than_the_bound_on_reading(saved):
    with pytest.raises(ValueError, match="bytes"):
        orbax_api.load(str(saved), {"a": None, "b": struct((2, 3))}, 8)


def test_orbax_describes_arrays_by_leaves_with_their_pieces(saved):
    described = orbax_api.described_arrays(str(saved))
    assert jax.tree.structure(described) == jax.tree.structure({"a": 0, "b": 0})
    assert described["b"].shape == (2, 3)
    assert described["b"].dtype == jnp.float32
    assert described["b"].storage_metadata.chunk_shape == (2, 3)


def test_orbax_keeps_the_sharding_of_each_array_of_jax(tmp_path):
    sharding = NamedSharding(MESH, PartitionSpec(None, ("data", "model")))
    arrays = {
        "mesh": jax.device_put(jnp.ones((2, 8)), sharding),
        "device": jax.device_put(jnp.ones(3), jax.devices()[1]),
        "numpy": np.ones(3),
    }
    orbax_api.begin_save(str(tmp_path / "saved"), arrays, {})()
    described = orbax_api.described_arrays(str(tmp_path / "saved"))
    kept = {name: orbax_api.saved_sharding(leaf) for name, leaf in described.items()}
    assert kept["mesh"] == orbax_api.SavedSharding(tuple(MESH.shape.items()), sharding.spec)
    assert kept["device"] == orbax_api.SavedSharding((), PartitionSpec())
    assert kept["numpy"] is None


def test_orbax_keeps_the_time_of_a_save_and_the_metadata_of_its_caller(saved):
    time, metadata = orbax_api.saved_metadata(str(saved))
    assert 0 <= datetime.datetime.now().timestamp() - time / 1e9 < 1000
    assert metadata == {"mine": {"kind": "test"}}


def test_orbax_does_not_know_the_layout_of_other_directories(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(Exception) as caught:  # noqa: PT011
        orbax_api.described_arrays(str(tmp_path))
    assert orbax_api.is_unknown_layout(caught.value)
    assert not orbax_api.is_unknown_layout(ValueError())


def test_orbax_writes_files_of_known_names_and_the_callers_metadata_into_one(saved):
    metadata = json.loads((saved / orbax_api.METADATA_FILE).read_text())
    assert metadata["custom_metadata"] == {"mine": {"kind": "test"}}
    files = [path.relative_to(saved) for path in saved.rglob("*") if path.is_file()]
    assert all(re.fullmatch(orbax_api.FILE_NAMES, path.name) for path in files)
    assert {str(path) for path in files} >= {orbax_api.METADATA_FILE, orbax_api.INDICATOR_FILE}
    described = {
        path.name for path in files if not any(map(orbax_api.holds_numbers, path.parts[:-1]))
    }
    assert "_METADATA" in described
    assert not any(len(name) == 32 for name in described)


def test_orbax_stores_no_empty_arrays(tmp_path):
    with pytest.raises(ValueError, match="zero size"), orbax_api.without_noise():
        orbax_api.begin_save(str(tmp_path / "saved"), {"a": jnp.ones(0)}, {})


def test_orbax_has_paths_of_object_stores():
    path = orbax_api.path_object("gs://bucket/run")
    assert str(path / "params") == "gs://bucket/run/params"


def test_a_region_says_which_mesh_axes_it_takes_over_and_which_not():
    seen = []

    def look(x):
        seen.append((jax_api.manual_mesh_axes(), jax_api.automatic_mesh_axes()))
        return x

    mesh = penzai_shard.make_mesh({"data": 4, "model": 2})
    spec = jax.sharding.PartitionSpec()
    jax.jit(
        jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"})
    ).lower(1.0)
    assert seen == [({"data"}, {"model"})]
    assert not jax_api.automatic_mesh_axes()


# Python


def test_what_is_called_before_threads_end_may_still_give_them_work():
    program = (
        "import concurrent.futures, runpy, sys; api = runpy.run_path(sys.argv[1]); "
        "pool = concurrent.futures.ThreadPoolExecutor(1); pool.submit(int).result(); "
        "api['before_threads_end'](lambda: print(pool.submit(int, 7).result()))"
    )
    command = [sys.executable, "-c", program, python_api.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert (done.stdout, done.stderr) == ("7\n", "")


def test_a_program_that_is_being_aborted_has_time_to_say_why():
    program = (
        "import ctypes, os, runpy, sys, threading, time; api = runpy.run_path(sys.argv[1]); "
        "api['delay_aborts'](); threading.Thread(target=ctypes.CDLL(None).abort).start(); "
        "time.sleep(0.3); print('why', flush=True); os._exit(75)"
    )
    command = [sys.executable, "-c", program, python_api.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (done.stdout, done.returncode) == ("why\n", 75)


# XLA: compiled programs


def test_what_settings_ask_of_a_compiler_is_told_to_another_process():
    option = "jax_disable_most_optimizations"
    before, asked = jax.config.read(option), compiler_api.options_of_this_process(8)
    jax.config.update(option, not before)
    try:
        assert compiler_api.options_of_this_process(8) != asked
    finally:
        jax.config.update(option, before)
    assert compiler_api.options_of_this_process(8) == asked


def test_programs_that_call_back_are_not_lowered_for_absent_devices_and_it_is_known_why():
    mesh = AbstractMesh((2,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)

    def asks(x):
        return x + jax.pure_callback(lambda: 1.0, jax.ShapeDtypeStruct((), x.dtype))

    def says(x):
        jax.debug.print("{}", x)
        return x

    for function in (asks, says):
        with pytest.raises(ValueError, match=r"devices|platform") as error:
            jax.jit(function).trace(x).lower(lowering_platforms=("tpu",))
        assert compiler_api.is_lacking_devices(error.value)
    assert not compiler_api.is_lacking_devices(ValueError("shapes differ"))


def test_a_mesh_over_slices_keeps_neighbours_within_one_slice():
    devices = [
        types.SimpleNamespace(id=i, slice_index=i // 4, device_kind="cpu", platform="cpu")
        for i in range(8)
    ]
    program = {"mesh_shape": {"data": 4, "model": 2}, "dcn_shape": (2, 1)}
    found = compiler_process.mesh_devices(program, devices)
    assert [one.id for one in found] == list(range(8))
    across = compiler_process.mesh_devices(program | {"dcn_shape": (1, 2)}, devices)
    assert [one.id for one in across] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert (
        compiler_process.mesh_devices({"mesh_shape": {}, "dcn_shape": ()}, devices) == devices[:1]
    )


SMALL_PROGRAM = """
HloModule m

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

ENTRY main {
  p = f32[4]{0} parameter(0), metadata={op_name="params['w']"}
  r = f32[4]{0} all-reduce(p), channel_id=1, replica_groups=[4,2]<=[8],
    use_global_device_ids=true, to_apply=add, metadata={op_name="jit(f)/\\"x\\"/psum"}
  s = ((f32[4]{0}), f32[1]{0}) reduce-scatter-start(r), channel_id=2, replica_groups=[2,4]<=[8],
    dimensions={0}, use_global_device_ids=true, to_apply=add
  d = f32[1]{0} reduce-scatter-done(s)
  ROOT t = (f32[4]{0}, f32[1]{0}) tuple(r, d)
}
"""


@pytest.fixture(scope="module")
def small_program():
    return compiler_api.module_from_text(SMALL_PROGRAM)


def instructions_of(module):
    return {one.name: one for part in module.computations() for one in part.instructions()}


def test_a_compiled_module_has_computations_of_instructions_with_operands_and_users(small_program):
    assert {"add", "main"} <= {one.name for one in small_program.computations()}
    found = instructions_of(small_program)
    assert [one.name for one in found["r"].operands()] == ["p"]
    assert {one.name for one in found["r"].users()} == {"s", "t"}
    assert found["r"].to_string().startswith("%r = f32[4]{0} all-reduce(%p), ")


def test_opcodes_are_named_as_in_texts(small_program):
    opcodes = {
        name: compiler_api.opcode_of(one) for name, one in instructions_of(small_program).items()
    }
    assert opcodes["r"] == "all-reduce"
    assert opcodes["t"] == "tuple"
    # What wraps a collective is written by the collective's own name.
    assert (opcodes["s"], opcodes["d"]) == ("async-start", "async-done")
    assert " reduce-scatter-start(" in instructions_of(small_program)["s"].to_string()


def test_an_asynchronous_instruction_knows_what_it_wraps(small_program):
    found = instructions_of(small_program)
    wrapped = compiler_api.wrapped_by(found["s"])
    assert compiler_api.opcode_of(wrapped) == "reduce-scatter"
    assert wrapped.name == compiler_api.wrapped_by(found["d"]).name
    assert wrapped.name in found


def test_the_short_text_names_the_entry_and_each_root(small_program):
    text = compiler_api.short_text(small_program)
    assert re.findall(r"^ENTRY (\S+) ", text, re.MULTILINE) == ["main"]
    assert re.findall(r"^ +ROOT (\S+) = ", text, re.MULTILINE) == ["sum", "t"]
    assert "op_name" not in text


def test_a_scheduled_program_says_in_which_order_it_runs_but_for_what_is_fused():
    text = """HloModule m, is_scheduled=true

    fused {
      q = f32[4]{0} parameter(0)
      ROOT n = f32[4]{0} negate(q)
    }

    ENTRY e {
      p = f32[4]{0} parameter(0)
      b = f32[4]{0} log(p)
      a = f32[4]{0} exponential(p)
      f = f32[4]{0} fusion(a), kind=kLoop, calls=fused
      ROOT t = (f32[4]{0}, f32[4]{0}, f32[4]{0}) tuple(a, b, f)
    }"""

    def order(module):
        return {
            each.name: [one.name for one in compiler_api.instructions_in_order(module, each)]
            for each in module.computations()
        }

    scheduled = compiler_api.module_from_text(text)
    assert order(scheduled) == {"fused": ["q", "n"], "e": ["p", "b", "a", "f", "t"]}
    copy = compiler_api.module_from_bytes(compiler_api.module_to_bytes(scheduled))
    assert order(copy) == order(scheduled)
    entry = next(one for one in copy.computations() if one.name == "e")
    found = {one.name: one for one in entry.instructions()}
    schedule = copy.schedule()
    schedule.set_sequence(entry, [found[name] for name in ("p", "a", "f", "b", "t")])
    copy.set_schedule(schedule)
    assert order(copy)["e"] == ["p", "a", "f", "b", "t"]
    assert [one.name for one in entry.instructions()] != order(copy)["e"]
    # Without a schedule, each instruction once, operands first.
    unscheduled = compiler_api.module_from_text(text.replace(", is_scheduled=true", ""))
    assert unscheduled.schedule() is None
    assert sorted(order(unscheduled)["e"]) == ["a", "b", "f", "p", "t"]


def test_a_compiled_module_survives_being_bytes_and_being_text(small_program):
    copy = compiler_api.module_from_bytes(compiler_api.module_to_bytes(small_program))
    assert copy.to_string() == small_program.to_string()
    assert compiler_api.module_from_text(copy.to_string()).to_string() == small_program.to_string()


@pytest.fixture(scope="module")
def lowered_step():
    def step(w, x):
        with jax.named_scope("a_scope"):
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ w["kernel"]), sharding()), x

    def sharding(*axes):
        return NamedSharding(MESH, PartitionSpec(*axes))

    return jax.jit(step).lower(
        {"kernel": jax.ShapeDtypeStruct((16, 8), "float32", sharding=sharding("model"))},
        x=jax.ShapeDtypeStruct((4, 16), "float32", sharding=sharding("data", "model")),
    )


def test_a_program_compiled_from_its_bytecode_is_the_one_that_jax_compiles(lowered_step):
    ours = compiler_api.compile_bytecode(
        compiler_api.bytecode_of(lowered_step), list(MESH.devices.flat)
    )
    theirs = lowered_step.compile()
    (module,) = theirs.runtime_executable().hlo_modules()
    opcodes, others = (
        {name: compiler_api.opcode_of(one) for name, one in instructions_of(each).items()}
        for each in (ours.module, module)
    )
    assert opcodes == others
    assert "all-reduce" in opcodes.values()
    stats = theirs.memory_analysis()
    assert (ours.memory.arguments, ours.memory.outputs, ours.memory.temporaries) == (
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.temp_size_in_bytes,
    )
    # What goes in has the names that a report finds arrays by.
    names = {
        one.to_string().partition('op_name="')[2].partition('"')[0].replace("\\", "")
        for one in instructions_of(ours.module).values()
        if compiler_api.opcode_of(one) == "parameter"
    }
    assert {"w['kernel']", "x"} <= names


@contextlib.contextmanager
def cached_in(folder):
    """JAX's cache of what is compiled is that folder."""
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_the_persistent_cache_does_not_give_a_program_with_other_names(tmp_path):
    def compiled(scope):
        def function(x):
            with jax.named_scope(scope):
                return jnp.tanh(x)

        lowered = jax.jit(function).lower(jax.ShapeDtypeStruct((4,), "float32"))
        program = compiler_api.compile_bytecode(
            compiler_api.bytecode_of(lowered), jax.devices()[:1]
        )
        return program.module.to_string()

    with cached_in(tmp_path):
        assert "one_scope" in compiled("one_scope")
        assert "another_scope" in compiled("another_scope")
        assert not list(tmp_path.iterdir())
        jax.jit(lambda x: x + 2)(3.0)
        assert list(tmp_path.iterdir())


@pytest.mark.parametrize("kept_bytes", [0, 1, 100])
def test_a_program_that_another_process_is_still_writing_into_the_cache_is_compiled_again(
    kept_bytes, tmp_path
):
    with cached_in(tmp_path):
        for _ in range(2):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                assert jax.jit(lambda x: x * 3 + 1)(3.0) == 10
            assert not said
            entries = list(tmp_path.iterdir())
            assert entries
            for entry in entries:
                entry.write_bytes(entry.read_bytes()[:kept_bytes])
            jax.clear_caches()


def test_a_process_of_the_tests_says_nothing_of_what_another_is_still_writing(tmp_path):
    program = (
        "import jax, pathlib, sys\n"
        "for _ in range(2):\n"
        "    print(jax.jit(lambda x: x * 2 + 1)(3.0))\n"
        "    for entry in pathlib.Path(sys.argv[1]).iterdir():\n"
        "        entry.write_bytes(entry.read_bytes()[:100])\n"
        "    jax.clear_caches()\n"
    )
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    for filters in (os.environ["PYTHONWARNINGS"], f"error,{UNFINISHED_ENTRY}"):
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path],
            env=environment | {"PYTHONWARNINGS": filters},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "7.0\n7.0\n", "")
        assert list(tmp_path.iterdir())


# Nothing else uses them

PACKAGE = pathlib.Path(penzai_shard.__file__).parent


def test_traced_functions_say_what_goes_into_them_under_which_names():
    layout = NamedSharding(MESH, PartitionSpec("data"))
    own = NamedSharding(MESH, PartitionSpec())

    def function(x, n, y, *rest, **more):
        return x * n + rest[0]["a"] * more["k"]

    jitted = jax.jit(function, static_argnums=1, donate_argnums=0)
    struct = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=layout)
    committed = jax.device_put(jnp.ones(8), own)
    traced = jitted.trace(struct, 2, committed, {"a": jnp.ones(8)}, k=1.0)
    assert compiler_api.traced_arguments(traced) == [
        compiler_api.TracedArgument("x", layout, True),
        compiler_api.TracedArgument("y", own, False),
        compiler_api.TracedArgument("rest[0]['a']", None, False),
        compiler_api.TracedArgument("more['k']", None, False),
    ]
    assert compiler_api.kept_arguments(traced.lower()) == {0, 2, 3}
    options = {"xla_cpu_enable_fast_math": True}
    told = jax.jit(lambda x: x, in_shardings=layout, compiler_options=options).trace(jnp.ones(8))
    assert compiler_api.compiler_options_of(told) == options
    assert compiler_api.compiler_options_of(traced) == {}
    assert compiler_api.traced_arguments(told)[0].sharding == layout


FRAGILE_MODULES = re.compile(
    r"jax\.(core|extend|experimental|interpreters|lib)\b|jaxlib\b|orbax\."
    r"|(jax|jnp|penzai|pz|treescope|optax)(\.\w+)*\._(?!_)"
)
FRAGILE_ATTRIBUTES = {
    *("source_info", "default_registry", "manual_axes", "weak_type", "_raw_value", "_destination"),
}
FRAGILE_OPTIONS = {"xla_backend_optimization_level"}


def fragile_uses(source):
    """The line and the name of each use of what is not promised, in a module's source."""
    nodes = list(ast.walk(ast.parse(source)))
    # A field of ours may be called alike.
    own = {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    for node in nodes:
        names, attribute = [], None
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names, attribute = [ast.unparse(node)], node.attr
        elif isinstance(node, ast.Constant) and node.value in FRAGILE_OPTIONS:
            attribute = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            attribute = getattr(node.args[1], "value", None)
        if attribute in (FRAGILE_ATTRIBUTES | FRAGILE_OPTIONS) - own:
            yield node.lineno, attribute
        yield from ((node.lineno, name) for name in names if FRAGILE_MODULES.match(name))


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax.extend import core",
        "from jax import core",
        "from jax.experimental.layout import Format",
        "import jax\njax.core.Tracer",
        "import jaxlib.xla_client",
        "equation.source_info.traceback",
        "jax.tree_util.default_registry",
        "variable._raw_value",
        "effect._destination = []",
        "jax.sharding.get_abstract_mesh().manual_axes",
        "aval.weak_type",
        "getattr(leaf, 'weak_type', False)",
        "import orbax.checkpoint as ocp",
        "from penzai.core._private import x",
        "import treescope._internal",
        "from treescope import _internal",
        "options = {'xla_backend_optimization_level': 1}",
    ],
)
def test_a_use_of_what_is_not_promised_is_found(source):
    assert list(fragile_uses(source))


def test_what_is_not_promised_is_used_in_library_apis_alone():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent.name != "library_apis"
        for line, name in fragile_uses(path.read_text(encoding="utf-8"))
    ]
    assert found == []


# Shardy, by way of jaxlib


def lowered_on(mesh, function, *arguments):
    """A function lowered for structs of the shape and spec that are given."""
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in arguments
    ]
    return jax.jit(function).trace(*structs).lower(lowering_platforms=("cpu",))


@pytest.fixture(scope="module")
def a_product():
    return lowered_on(
        AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2),
        lambda x, w: jnp.tanh(x @ w),
        ((16, 16), ("data",)),
        ((16, 8), (None, "model")),
    )


def test_shardy_says_where_layouts_come_from_without_devices(a_product):
    program = shardy_api.propagated(a_product)
    assert program.argument_names == ("x", "w")
    assert program.mesh == {"data": 4, "model": 2}
    product, tanh = (operation for operation in program.main.operations[:2])
    assert product.rule.operands == (((0,), (2,)), ((2,), (1,)))
    assert product.rule.reduced == {2}
    taken = {(each.mesh_axis, each.source, each.targets) for each in product.edges}
    result = (("result", 0),)
    assert taken == {("data", ("operand", 0), result), ("model", ("operand", 1), result)}
    assert program.values[tanh.results[0]].spec == (("data",), ("model",))
    assert program.values[tanh.results[0]].origins == {"data": "input: 0", "model": "input: 1"}


def test_a_lowered_program_stays_as_it_is_when_its_layouts_are_propagated(a_product):
    before = a_product.as_text()
    assert shardy_api.propagated(a_product) == shardy_api.propagated(a_product)
    assert a_product.as_text() == before


def test_operations_of_a_lowered_program_say_where_they_were_written(a_product):
    operation = shardy_api.propagated(a_product).main.operations[0]
    frame = operation.frames[0]
    assert (pathlib.Path(frame.file), frame.function) == (
        pathlib.Path(__file__),
        "a_product.<locals>.<lambda>",
    )
    assert operation.name == "jit(<lambda>)/dot_general"


def test_a_slice_of_a_lowered_program_says_what_it_takes_of_each_dimension():
    lowered = jax.jit(lambda x: x[1:3, ::2]).lower(np.ones((4, 6), np.float32))
    operations = shardy_api.propagated(lowered).main.operations
    assert operations[0].cuts == ((1, 3, 1), (0, 6, 2))
    assert operations[-1].cuts == ()


def test_of_two_layouts_that_want_a_mesh_axis_shardy_says_the_one_that_wins_compiled():
    split, whole = (NamedSharding(MESH, PartitionSpec(*axes)) for axes in (("data",), ()))

    def product_and_gradient(rows, w):
        x = rows[:, None]
        y = jnp.sin(x @ w)
        return y, jax.lax.with_sharding_constraint(y.T @ x, split)

    rows = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)
    w = jax.ShapeDtypeStruct((1, 32), jnp.float32, sharding=whole)
    lowered = jax.jit(product_and_gradient).lower(rows, w)
    compiled, _ = lowered.compile().output_shardings
    program = shardy_api.propagated(lowered)
    products = [each for each in program.main.operations if each.kind == "stablehlo.dot_general"]
    assert compiled.spec == PartitionSpec("data")
    assert program.values[products[0].results[0]].spec == (("data",), ())


def test_shardy_splits_mesh_axes_in_parts():
    program = shardy_api.propagated(
        lowered_on(
            AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)),
            lambda x: x.reshape(2, 8, 4),
            ((16, 4), ("data",)),
        )
    )
    assert program.values[1].spec == (("data:(1)2",), ("data:(2)4",), ())
    assert set(program.values[1].origins) == {"data:(1)2", "data:(2)4"}


class _OtherPasses:
    """Stands in for jaxlib's PassManager; gives another text for the passes that XLA runs."""

    def __init__(self, text):
        self.text = text

    def parse(self, pipeline):
        return self.text if "sdy-propagation-pipeline" in pipeline else PassManager.parse(pipeline)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("builtin.module(symbol-dce)", r"'sdy-user-priority-propagate' is not among them\. Plans"),
        (
            "builtin.module(sdy-user-priority-propagate{debug-sharding-origins=false})",
            "has no option 'debug-propagation-edge-sharding'",
        ),
        (
            "builtin.module(sdy-no-such-pass,sdy-user-priority-propagate{debug-sharding-origins="
            "false debug-propagation-edge-sharding=false keep-sharding-rules=true})",
            "'sdy-no-such-pass' does not refer to a registered pass",
        ),
        (
            "builtin.module(sdy-user-priority-propagate{debug-sharding-origins=false no-such-option"
            "=true debug-propagation-edge-sharding=false keep-sharding-rules=true})",
            "no such option no-such-option",
        ),
    ],
)
def test_passes_that_jaxlib_does_not_have_are_refused_by_name(
    a_product, monkeypatch, text, problem
):
    monkeypatch.setattr(shardy_api, "PassManager", _OtherPasses(text))
    with pytest.raises(PropagationError, match=f"jaxlib .*{problem}.*"):
        shardy_api.propagated(a_product)


def test_a_jaxlib_without_shardy_is_refused_by_name(a_product, monkeypatch):
    monkeypatch.setattr(shardy_api, "sdy", None)
    with pytest.raises(PropagationError, match=r"it has no dialect of Shardy\. Plans, device_mem"):
        shardy_api.propagated(a_product)


def test_a_compiler_for_cpus_holds_and_sends_float16_as_it_is_and_not_bfloat16():
    laid_out = NamedSharding(MESH, PartitionSpec(None, MESH.axis_names))
    args = [
        jax.ShapeDtypeStruct((16, 64), jnp.bfloat16, sharding=laid_out),
        jax.ShapeDtypeStruct((16, 64), jnp.bfloat16, sharding=laid_out),
    ]

    def masked(a, b):
        return jnp.where(a @ b.T > 0, 1.0, jnp.finfo(jnp.bfloat16).min).astype(jnp.bfloat16)

    product = jax.jit(masked, out_shardings=NamedSharding(MESH, PartitionSpec()))
    lowered = product.trace(*args).lower()
    for with_float16, sent in ((False, "f32"), (True, "f16")):
        bytecode = compiler_api.bytecode_of(lowered, with_float16=with_float16)
        module = compiler_api.compile_bytecode(bytecode, list(MESH.devices.flat)).module
        assert f"{sent}[16,16]{{1,0}} all-reduce(" in module.to_string()


def test_products_in_float16_stay_so_in_programs_that_are_priced():
    half = jax.ShapeDtypeStruct((64, 64), jnp.float16)
    lowered = jax.jit(lambda x, w: x @ w).lower(half, half)
    text = lowered.compile(compiler_options=dict(compiler_api.FOR_PRICES_ON_CPUS)).as_text()
    assert "f16[64,64]{1,0} dot(" in text
    assert "f32[" not in text
