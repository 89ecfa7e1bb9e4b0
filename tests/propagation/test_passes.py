"""What cannot be propagated is refused by name."""

import types

import jax
import pytest
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir

import penzai_shard as pzs
from penzai_shard.propagation import passes
from penzai_shard.propagation.flat import propagate_lowered
from tests.propagation.programs import array, lower


def problems_of(lowered):
    with pytest.raises(pzs.PropagationError) as caught:
        propagate_lowered(lowered)
    return [(each.path, each.kind) for each in caught.value.problems]


def test_propagate_refuses_unknown_shapes_and_several_meshes():
    (n,) = export.symbolic_shape("n")
    x, y = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((n, 4), (4, n)))
    found = problems_of(lower(lambda x, y: x @ y, x, y))
    assert found[:2] == [("x", "unknown shape"), ("y", "unknown shape")]
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    pin = lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))  # noqa: E731
    assert problems_of(lower(pin, array("data"))) == [("", "several meshes")]


def test_propagate_names_a_jaxlib_with_other_passes(monkeypatch):
    monkeypatch.setattr(passes, "_PIPELINE", "canonicalize")
    assert problems_of(lower(lax.sin, array())) == [("", "other jaxlib")]


# JAX lowers neither of these: a length that is computed, a tie over the border of a shard_map.
MODULES = {
    "unknown shape": """(%n: tensor<1xi32>) -> tensor<?xi32> {
      %0 = "stablehlo.dynamic_iota"(%n) {iota_dimension = 0 : i64}
        : (tensor<1xi32>) -> tensor<?xi32> loc("f/one")
      return %0 : tensor<?xi32> }""",
    "refused": """(%x: tensor<8xf32>) -> tensor<8xf32> {
      sdy.sharding_group %x group_id=0 : tensor<8xf32>
      %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"data"}]>]
          out_shardings=[<@mesh, [{"data"}]>] manual_axes={"data"} (%a: tensor<4xf32>) {
        sdy.sharding_group %a group_id=0 : tensor<4xf32> loc("f/one")
        sdy.return %a : tensor<4xf32> } : (tensor<8xf32>) -> tensor<8xf32>
      return %0 : tensor<8xf32> }""",
}


@pytest.mark.parametrize("kind", MODULES)
def test_propagate_refuses_an_operation_by_its_name(kind):
    text = f'module {{ sdy.mesh @mesh = <["data"=2]> func.func public @main{MODULES[kind]} }}'
    with lower(lax.sin, array()).compiler_ir("stablehlo").context:
        module = ir.Module.parse(text)
    lowered = types.SimpleNamespace(compiler_ir=lambda dialect: module)
    assert problems_of(lowered) == [("f/one", kind)]
