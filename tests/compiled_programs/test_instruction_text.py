"""Lines of programs taken apart."""

import pytest

from penzai_shard.compiled_programs.instruction_text import (
    ArrayType,
    InstructionText,
    arrays_of,
    read_type,
)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("f32", (4, 8), 128),
        ("bf16", (), 2),
        ("pred", (3,), 3),
        ("s4", (5,), 3),
        ("u2", (3, 3), 3),
        ("f8e4m3fn", (16,), 16),
        ("f4e2m1fn", (16,), 8),
        ("c64", (2,), 16),
        ("c128", (2,), 32),
        ("token", (), 0),
        ("f32", (0, 4), 0),
    ],
)
def test_arrays_have_the_bytes_of_their_elements(dtype, shape, size):
    assert ArrayType(dtype, shape).bytes == size


@pytest.mark.parametrize(
    ("text", "arrays"),
    [
        ("f32[]", ["f32[]"]),
        ("bf16[4,8]{1,0:T(8,128)(2,1)S(1)}", ["bf16[4,8]"]),
        ("f32[<=8,2]{1,0}", ["f32[8,2]"]),
        ("(f32[2]{0}, /*index=1*/(u32[], token[]))", ["f32[2]", "u32[]", "token[]"]),
        ("()", []),
        ("f8e4m3fn[4]{0:E(8)}", ["f8e4m3fn[4]"]),
    ],
)
def test_types_are_read(text, arrays):
    assert [str(array) for array in arrays_of(read_type(text))] == arrays


@pytest.mark.parametrize(
    "text",
    ["", "f32", "f32[4", "f32[a]", "(f32[4]", "f32[4])", "f32[4]f32[4]", "(f32[4] f32[4])", "[4]"],
)
def test_other_types_are_refused(text):
    with pytest.raises(ValueError, match="not a type"):
        read_type(text)


def test_texts_in_attributes_are_left_alone():
    text = InstructionText.of(
        r"ROOT %r.1 = (f32[4]{0}, u32[]) custom-call(%a, /*index=1*/%b), calls=%c, "
        r'metadata={op_name="x, calls=%d, )]}\" y"}, backend_config={"a":["},"]}, device_ids=1'
    )
    assert (text.opcode, text.operands) == ("custom-call", "%a, /*index=1*/%b")
    assert text.attributes == {
        "calls": "%c",
        "metadata": r'{op_name="x, calls=%d, )]}\" y"}',
        "backend_config": '{"a":["},"]}, device_ids=1',
    }


@pytest.mark.parametrize(
    "line", ["", "add(a, b)", "%r = f32[4]", "%r = f32[4] add(a", "%r = (f32[4] add(a)"]
)
def test_other_lines_are_refused(line):
    with pytest.raises(ValueError, match=r"not an instruction|not closed"):
        InstructionText.of(line)
