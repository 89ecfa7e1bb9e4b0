"""What edits refuse: functions that fail or give no layer, and models that JAX cannot take."""

import collections
import re

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

from penzai_shard import (
    ROOT,
    Inserted,
    Recipe,
    insert_after,
    insert_before,
    replace,
    strip,
    wrap,
)
from penzai_shard.errors import RuleTypeError
from penzai_shard.layers import (
    Checkpointed,
    ConstrainSharding,
    ConstrainShardingByName,
    Jitted,
    RolledLayerStack,
)
from penzai_shard.surgery import InsertedSequence, Original
from tests.surgery.small_models import Block, mlp

FIRST_LINEAR = "sublayers/0/sublayers/0/delta/sublayers/0"


class Unregistered:
    """Holds a layer where JAX cannot see it."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


class Hidden(equinox.Module):
    """Holds a layer in what is not a part of the tree."""

    layer: object = equinox.field(static=True)

    def __call__(self, x):
        return self.layer(x)


def refused(edit, model=None):
    """The error of an edit, which apply and report raise alike."""
    model = mlp(1) if model is None else model
    with pytest.raises(RuleTypeError) as error:
        Recipe(edit).apply(model)
    with pytest.raises(RuleTypeError) as reported:
        Recipe(edit).report(model)
    assert str(reported.value) == str(error.value)
    return error.value


NOT_LAYERS = {
    "text": (
        "dense",
        "returned 'dense' of type str where a layer belongs. Return the layer from it.",
    ),
    "a number": (3, "returned 3 of type int where a layer belongs."),
    "a truth value": (True, "returned True of type bool where a layer belongs."),
    "nothing": (None, "returned None where a layer belongs. Return the layer from it."),
    "a class": (
        pz.nn.Identity,
        "returned the class Identity and not a layer. Return Identity(...).",
    ),
    "an array": (jnp.ones(2), "of type ArrayImpl where a layer belongs."),
    "a NumPy array": (np.ones(2), "of type ndarray where a layer belongs."),
    "a named array": (pz.nx.ones({"a": 2}), "of type NamedArray where a layer belongs."),
    "a dictionary": ({"a": 1}, "returned {'a': 1} of type dict where a layer belongs."),
    "a function": (jnp.sin, "which is not a pytree: its parameters would be lost. Make it a layer"),
}


@pytest.mark.parametrize("name", NOT_LAYERS)
@pytest.mark.parametrize("make", [wrap, insert_after, insert_before])
def test_what_is_not_a_layer_is_refused(make, name):
    given, message = NOT_LAYERS[name]
    error = refused(make(pz.nn.Linear, lambda layer: given))
    assert message in str(error)
    assert f"at {FIRST_LINEAR}: the function returned " in str(error)
    assert str(error).startswith(
        f"this recipe cannot be applied to the Sequential:\n  edit 1, {make.__name__}("
    )


@pytest.mark.parametrize("name", sorted(set(NOT_LAYERS) - {"a function"}))
def test_a_layer_is_replaced_by_a_layer(name):
    given, message = NOT_LAYERS[name]
    assert message in str(refused(replace(pz.nn.Linear, lambda layer: given)))


def test_what_is_not_a_layer_is_replaced_by_anything():
    edited = Recipe(replace(pz.Parameter, lambda parameter: None)).apply(mlp(1))
    assert pz.unbind_params(edited)[1] == ()


DROPPING = {
    "a list": lambda layer: [layer],
    "a tuple": lambda layer: (layer, layer),
    "a dictionary": lambda layer: {"layer": layer},
    "an unregistered class": Unregistered,
}
LOSING = {
    "another layer": lambda layer: pz.nn.Identity(),
    "a library wrapper of another layer": lambda layer: Jitted(pz.nn.Identity()),
    "what is in the layer": lambda layer: Jitted(layer.delta),
    "a copy of other values": lambda layer: Jitted(jax.tree.map(lambda x: x, mlp(1))),
    "a static field": Hidden,
    "a rolled stack of another layer": lambda layer: RolledLayerStack(pz.nn.Identity(), "n", 2),
    "a constraint": lambda layer: ConstrainSharding(None),
    "an inserted other layer": lambda layer: Inserted(pz.nn.Identity()),
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_container_is_not_a_wrapper(name):
    message = str(refused(wrap(pz.nn.Residual, DROPPING[name])))
    assert "where a layer belongs" in message or "is not a pytree" in message


@pytest.mark.parametrize("name", LOSING)
def test_a_wrapper_that_drops_its_layer_is_refused(name):
    error = refused(wrap(pz.nn.Residual, LOSING[name]))
    message = (
        r"at sublayers/0/sublayers/0: the function returned \w+, which does not hold the Residual "
        r"that it was given\. Put that into it, or use replace\."
    )
    assert re.search(message, str(error))


def test_a_wrapper_may_leave_layers_as_they_are():
    model = mlp(2)
    assert Recipe(wrap(Block, lambda block: block)).apply(model) is model
    only = Recipe(wrap(Block, lambda block, path: Jitted(block) if path[-1] == "1" else block))
    assert only.apply(model).sublayers[0] is model.sublayers[0]
    assert strip(only.apply(model)) == model


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ConstrainShardingByName, "is not a wrapper: it holds no layer. Put an instance of it be"),
        (ConstrainSharding, "is not a wrapper: it holds no layer"),
        (RolledLayerStack, r"Write replace\(pz\.nn\.LayerStack, RolledLayerStack\.from_layer_stac"),
        (Inserted, "is to be taken off again. The edits put it where it is needed"),
        (Original, "says what an inserted layer was put around"),
        (InsertedSequence, "holds a list of layers. Use insert_before or insert_after"),
        (pz.nn.Identity, "Identity takes no layer. Give a function or class that does"),
        (lambda: None, "takes no layer"),
    ],
)
def test_a_class_that_is_not_a_wrapper_is_refused_where_it_is_written(given, message):
    with pytest.raises(RuleTypeError, match=f"^wrap: .*{message}"):
        wrap(pz.nn.Linear, given)


def test_options_for_the_layer_itself_are_refused():
    with pytest.raises(RuleTypeError, match="Checkpointed's 'body' is the layer itself"):
        wrap(pz.nn.Linear, Checkpointed, body=3)

    def keyword(layer=None, *, rate):
        return layer

    with pytest.raises(RuleTypeError, match=r"needs rate beside the layer.*rate=\.\.\."):
        wrap(pz.nn.Linear, keyword)


def test_nothing_goes_around_what_is_not_a_layer():
    message = str(refused(wrap(pz.Parameter, Jitted)))
    assert "Parameter is not a layer, so that nothing can be put around it" in message
    message = str(refused(insert_after(dict, pz.nn.Identity()), [{"b": pz.nn.Identity()}]))
    assert "at 0: dict is not a layer" in message


def test_a_class_is_not_a_model():
    message = "at the root: the class Linear is not a layer"
    assert message in str(refused(wrap(ROOT, Jitted), pz.nn.Linear))


def test_a_sequence_takes_a_list():
    message = "Sequential takes a list of layers. Write Sequential([layer])."
    assert message in str(refused(wrap(pz.nn.Linear, pz.nn.Sequential)))


def test_a_layer_is_not_a_place():
    with pytest.raises(RuleTypeError, match=r"Identity\(...\) is a layer. Give Identity\."):
        wrap(pz.nn.Identity(), Jitted)
    with pytest.raises(RuleTypeError, match=r"Block\(...\) is a layer. Give Block\."):
        wrap(pz.nn.Linear, Jitted, within=Block([]))


def test_strip_leaves_something():
    with pytest.raises(RuleTypeError, match="the root: nothing would be left of this Sequential"):
        strip(mlp(1), layers=pz.nn.Layer)


def test_all_places_are_reported_at_once():
    def uneven(block, path):
        return {"0": None, "1": jnp.ones(2), "2": Jitted(block), "3": pz.nn.Identity()}[path[-1]]

    with pytest.raises(RuleTypeError) as error:
        Recipe(wrap(Block, uneven)).apply(mlp(5))
    message = [problem.partition("), at ")[2] for problem in error.value.problems]
    assert [line.partition(": the function ")[0] for line in message] == [
        f"sublayers/{number}" for number in (0, 1, 3, 4)
    ]
    assert message[-1].endswith("the function uneven raised KeyError: '4'")


class TestFunctionsThatRaise:
    def test_a_wrapper(self):
        def broken(layer):
            return {}["rate"]

        error = refused(wrap(pz.nn.Linear, broken))
        message = f"at {FIRST_LINEAR}: the function broken raised KeyError: 'rate'"
        assert error.problems[0].endswith(message)
        assert type(error.__cause__) is KeyError

    def test_a_predicate_with_the_path_that_it_was_given(self):
        def broken(node, path):
            return path.endswith("sublayers/1") and node.no_such

        error = refused(wrap(broken, Jitted))
        message = (
            "at sublayers/0/sublayers/0/delta/sublayers/1: the predicate broken raised "
            "AttributeError: 'Elementwise' object has no attribute 'no_such'"
        )
        assert str(error).endswith(message)
        assert type(error.__cause__) is AttributeError

    def test_a_predicate_whose_answer_is_not_one(self):
        error = refused(wrap(lambda node: jnp.ones(2) > 0, Jitted))
        assert "at the root: the predicate" in str(error)
        assert "raised ValueError: " in str(error)

    @pytest.mark.parametrize("around", ["within", "outside"])
    def test_a_predicate_that_narrows(self, around):
        def broken(node):
            if isinstance(node, Block):
                raise OSError("no such file")
            return False

        message = str(refused(wrap(pz.nn.Linear, Jitted, **{around: broken})))
        assert message.endswith("at sublayers/0: the predicate broken raised OSError: no such file")

    def test_an_inserted_layer_s_function_with_the_edit_s_number(self):
        recipe = Recipe(wrap(Block, Jitted), insert_after(Block, lambda block: 1 / 0))
        with pytest.raises(RuleTypeError) as error:
            recipe.apply(mlp(2))
        assert "\n  edit 2, insert_after('tests.surgery" in str(error.value)
        assert "at sublayers/0/body: the function" in str(error.value)
        assert len(error.value.problems) == 2

    def test_what_did_not_fit_before_is_reported_too(self):
        recipe = Recipe(wrap(pz.nn.Attention, Jitted), wrap(Block, lambda block: 1 / 0))
        with pytest.raises(RuleTypeError) as error:
            recipe.apply(mlp(1))
        assert [line[:7] for line in error.value.problems] == ["edit 1,", "edit 2,"]

    def test_a_function_that_recurses_without_end(self):
        def endless(layer):
            return endless(layer)

        message = str(refused(wrap(pz.nn.Linear, endless)))
        assert f"at {FIRST_LINEAR}: the function" in message
        assert "raised RecursionError" in message

    def test_interrupts_go_through(self):
        def interrupted(layer):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Recipe(wrap(pz.nn.Linear, interrupted)).apply(mlp(1))


def ring():
    parts = [pz.nn.Identity()]
    parts.append(pz.nn.Residual(pz.nn.Sequential(parts)))
    return pz.nn.Sequential(parts)


class TestModelsThatJaxCannotTake:
    def test_a_cyclic_model(self):
        message = (
            "at sublayers/1/delta/sublayers: this is the same list as at sublayers: the model "
            "contains itself"
        )
        for edit in (wrap(pz.nn.Linear, Jitted), wrap(lambda node: False, Jitted)):
            assert message in str(refused(edit, ring()))
        with pytest.raises(RuleTypeError, match="contains itself"):
            strip(ring())

    def test_cyclic_dictionaries_and_wrappers(self):
        model = {"a": [pz.nn.Identity()]}
        model["b"] = {"c": model}
        message = str(refused(wrap("nothing/**", Jitted), model | {"nothing": model}))
        assert "contains itself" in message
        message = str(refused(wrap(pz.nn.Linear, lambda layer: ring())))
        assert f"at {FIRST_LINEAR}/sublayers/1/delta/sublayers: this is the same list" in message

    def test_a_model_too_deep_for_python(self):
        model = pz.nn.Identity()
        for _ in range(2000):
            model = pz.nn.Residual(model)
        message = str(refused(wrap(pz.nn.Identity, Jitted), model))
        assert "nested 2000 levels deep" in message
        assert "sys.setrecursionlimit(" in message

    @pytest.mark.parametrize("kind", [dict, lambda d: collections.defaultdict(list, d)])
    def test_keys_of_several_types(self, kind):
        model = pz.nn.Sequential([kind({"a": pz.nn.Identity(), 1: pz.nn.Identity()})])
        message = r"at sublayers/0: JAX cannot sort the keys of this dictionary, such as 'a' and 1"
        assert re.search(message, str(refused(wrap(pz.nn.Identity, Jitted), model)))
        with pytest.raises(RuleTypeError, match=message):
            strip(model)

    def test_keys_of_one_type_and_ordered_ones(self):
        model = {
            "numbers": {2: pz.nn.Identity(), 1: pz.nn.Identity()},
            "ordered": collections.OrderedDict([("a", pz.nn.Identity()), (1, pz.nn.Identity())]),
        }
        edited = Recipe(wrap(pz.nn.Identity, Jitted, expect=4)).apply(model)
        assert strip(edited) == model
