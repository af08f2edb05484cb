"""Every `Kernel` declares the arguments that its C++ function has, and every C++ kernel is declared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import turbogr.ops  # noqa: F401  declares the kernels
from turbogr.ops import native
from turbogr.ops.native import Argument, Kernel, parse_arguments

SOURCES = Path(__file__).parents[2] / "csrc"
PROTOTYPE = re.compile(r"TURBOGR_KERNEL\((\w+)\)\s*\(([^)]*)\)\s*\{")


def read_prototypes(source: str) -> dict[str, list[Argument]]:
    """The parameters of every kernel that a C++ source defines; a parameter without a name is called ''."""
    found = {}
    for name, parameters in PROTOTYPE.findall(source):
        arguments = []
        for parameter in parameters.split(","):
            base, *rest = re.findall(r"\w+|\*", re.sub(r"\bconst\b", "", parameter))
            names = [word for word in rest if word != "*"]
            assert len(names) < 2, f"{name}: cannot read the parameter '{parameter.strip()}'"
            arguments.append(Argument(base.removesuffix("_t") + "*" * rest.count("*"), "".join(names)))
        found[name] = arguments
    return found


def find_mismatches(declared: list[Argument], defined: list[Argument]) -> list[str]:
    """What differs between a declaration and a C++ definition, argument by argument."""
    problems = []
    if len(declared) != len(defined):
        problems.append(f"{len(declared)} arguments declared, {len(defined)} defined")
    for number, (ours, theirs) in enumerate(zip(declared, defined, strict=False)):
        if ours.type != theirs.type or (theirs.name and ours.name != theirs.name):
            problems.append(f"argument {number}: declared '{' '.join(ours)}', defined '{' '.join(theirs)}'")
    return problems


def all_prototypes() -> dict[str, list[Argument]]:
    return {
        name: parameters
        for path in sorted(SOURCES.glob("*.cpp"))
        for name, parameters in read_prototypes(path.read_text()).items()
    }


@pytest.mark.parametrize("kernel", native.kernels(), ids=lambda kernel: kernel.name)
def test_a_kernel_is_declared_as_it_is_defined(kernel: Kernel) -> None:
    assert find_mismatches(kernel.arguments, all_prototypes()[kernel.name]) == []


def test_every_defined_kernel_is_declared() -> None:
    assert {kernel.name for kernel in native.kernels()} == set(all_prototypes())


DEFINITION = """
TURBOGR_KERNEL(scale)
(const float* x, const int64_t* const* parts, int32_t* out, int64_t num_rows, uint64_t seed, float factor, int64_t) {
"""
DECLARATION = "float *x; int64 **parts; int32 *out; int64 num_rows; uint64 seed; float factor; int64 unused"


def test_the_comparison_accepts_the_same_arguments() -> None:
    assert find_mismatches(parse_arguments(DECLARATION), read_prototypes(DEFINITION)["scale"]) == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (DECLARATION.replace("float *x", "int64 *x"), "argument 0: declared 'int64* x', defined 'float* x'"),
        (DECLARATION.replace("**parts", "*parts"), "argument 1: declared 'int64* parts', defined 'int64** parts'"),
        (DECLARATION.replace("int32 *out", "int64 *out"), "argument 2: declared 'int64* out', defined 'int32* out'"),
        (DECLARATION.replace("num_rows", "rows"), "argument 3: declared 'int64 rows', defined 'int64 num_rows'"),
        (DECLARATION.replace("uint64", "int64"), "argument 4: declared 'int64 seed', defined 'uint64 seed'"),
        (DECLARATION.replace("float factor", "int64 factor"), "argument 5: declared 'int64 factor'"),
        (DECLARATION.replace("int64 unused", "float unused"), "argument 6: declared 'float unused', defined 'int64 '"),
        (DECLARATION.removesuffix("; int64 unused"), "6 arguments declared, 7 defined"),
    ],
    ids=lambda text: text[:30],
)
def test_the_comparison_finds_one_changed_argument(wrong: str, problem: str) -> None:
    (found,) = find_mismatches(parse_arguments(wrong), read_prototypes(DEFINITION)["scale"])
    assert found.startswith(problem)


@pytest.mark.parametrize("text", ["float", "*x", "float *x; ; int64 y", "int32 width", "double factor"])
def test_a_declaration_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a type followed by names|a kernel takes pointers and"):
        parse_arguments(text)
