"""Names of operations that a compiler joined are taken apart."""

import pytest

from penzai_shard.compiled_programs.operation_names import merged_names


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("", [""]),
        ("jit(f)/a/add", ["jit(f)/a/add"]),
        ("jit(f)/(a:b)", ["jit(f)/a", "jit(f)/b"]),
        ("(jit(f)/a:jit(g)/b)", ["jit(f)/a", "jit(g)/b"]),
        ("jit(f)/(a:a:b)", ["jit(f)/a", "jit(f)/a", "jit(f)/b"]),  # One for each that was merged.
        ("jit(f)/(a:b)/(c:d)", ["jit(f)/a/c", "jit(f)/a/d", "jit(f)/b/c", "jit(f)/b/d"]),
        ("jit(f)/(a/(b:c/(d:e)):f)", [f"jit(f)/{x}" for x in ("a/b", "a/c/d", "a/c/e", "f")]),
        (
            "jit(f)/(jvp(loss)/x:transpose(jvp(loss))/y)",
            ["jit(f)/jvp(loss)/x", "jit(f)/transpose(jvp(loss))/y"],
        ),
        ("jit(f)/mul;jit(f)/(a:b)", ["jit(f)/mul", "jit(f)/a", "jit(f)/b"]),
        # Names of people that look alike.
        ("jit(f)/(a)/add", ["jit(f)/(a)/add"]),
        ("jit(f)/jit(a:b)/add", ["jit(f)/jit(a:b)/add"]),
        ("jit(f)/a:b/add", ["jit(f)/a:b/add"]),
        ("jit(f)/(a:b", ["jit(f)/(a:b"]),
        ("jit(f)/a)/(b:c)", ["jit(f)/a)/b", "jit(f)/a)/c"]),
        ("jit(f)/bij,jk->bik/dot", ["jit(f)/bij,jk->bik/dot"]),
    ],
)
def test_each_merged_operation_has_its_name(name, names):
    assert merged_names(name) == tuple(names)
