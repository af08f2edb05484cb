"""Random inputs through every operator, meant for the kernels that are built with sanitizers (`make fuzz`):

    python -m tests.fuzz.operators --inputs 1000000 --json fuzz.json

Every sound input must be computed, forward and backward, and what comes out must be finite; a part of it is compared
with the definition in float64. Every damaged input must be refused with a ValueError. Anything else is a failure, and
so is every word of a sanitizer.
"""

from __future__ import annotations

import sys
import traceback

import torch
from torch import Tensor

from tests.fuzz.operator_inputs import Call, draw_call
from tests.fuzz.watching import Cases, Outcome, run_cases
from turbogr.ops import bf16_unit, native, registry
from turbogr.ops.jagged_attention import cpu_relative

_COMPARED_EVERY = 21  # which has no factor in common with the number of operators


def sanitizers() -> str:
    """The sanitizers of the loaded kernels: they call functions with these names."""
    content = native.PATH.read_bytes() if native.PATH.exists() else b""
    marks = {"address": b"__asan_", "undefined": b"__ubsan_"}
    return ",".join(name for name, mark in marks.items() if mark in content)


def settle(block: int) -> str:
    """Choose the instruction set, the number of threads and attention's size of blocks; return their name."""
    isas = native.available_isas()
    turn = block // len(isas)
    isa, small, threads = isas[block % len(isas)], turn % 2, 2 if turn % 8 > 5 else 1
    bf16_unit.use("none")
    native.set_isa(isa)
    bf16_unit.use(bf16_unit.best())  # a unit has kernels for some instruction sets only
    torch.set_num_threads(threads)
    cpu_relative.SMALL_BLOCKS_UP_TO = 2**62 if small else 0
    return f"{isa}, {threads} threads, {'small' if small else 'large'} blocks of attention"


def compute(seed: int, number: int) -> Outcome:
    """Compute an input, and compare some with the definition."""
    call = draw_call(seed, number)
    try:
        results = call.run()
    except ValueError as error:
        return Outcome("refused", call.operator, None if call.damage else f"a sound input is refused: {error}")
    except Exception:
        return Outcome("refused", call.operator, f"{call.damage or 'sound'}: {traceback.format_exc()}")
    if call.damage:
        return Outcome("computed", call.operator, f"{call.damage}, and it is computed")
    if not call.calm:
        return Outcome("computed", call.operator)
    if not all(bool(result.isfinite().all()) for result in results):
        return Outcome("computed", call.operator, "not finite")
    if number % _COMPARED_EVERY or call.args.get("precision", "fp32") != "fp32":  # rounding may go the other way
        return Outcome("computed", call.operator)
    return Outcome("computed", call.operator, difference(call, results), compared=True)


def difference(call: Call, results: list[Tensor]) -> str | None:
    """Compare with the definition in float64.

    Allowed are some times the error of the definition in the same type, and a small part of the largest number of the
    call: where terms cancel each other, as in the gradient of a vector of one element that is scaled to length 1, they
    leave their rounding.
    """
    with registry.backend("reference"):
        exact, plain = call.run(torch.float64), call.run()
    if len(exact) != len(results):
        return f"{len(results)} results, not {len(exact)}"
    narrow = any(isinstance(value, Tensor) and value.dtype == torch.bfloat16 for value in call.args.values())
    finite = [x for x in exact if x.is_floating_point() and x.numel() and bool(x.isfinite().all())]
    largest = max((float(x.abs().max()) for x in finite), default=0.0)
    coarse = (0.05 if narrow else 1e-4) * largest + 1e-5
    for number, (ours, wanted, theirs) in enumerate(zip(results, exact, plain, strict=True)):
        if ours.shape != wanted.shape:
            return f"result {number} has shape {tuple(ours.shape)}, not {tuple(wanted.shape)}"
        if not wanted.is_floating_point():
            if not torch.equal(ours, wanted):
                return f"result {number} differs"
        elif wanted.numel() and bool(wanted.isfinite().all()):  # the definition overflows at times 2**63 apart
            allowed = 10 * float((theirs.double() - wanted).abs().max()) + coarse
            error = float((ours.double() - wanted).abs().max())
            if not error <= allowed:
                return f"result {number} is {error:.3g} off, allowed {allowed:.3g}"
    return None


if __name__ == "__main__":
    cases = Cases(
        module="tests.fuzz.operators",
        identity={"sanitizers": sanitizers(), "instruction_sets": native.available_isas()},
        settle=settle,
        compute=compute,
        describe=lambda seed, number: str(draw_call(seed, number)),
    )
    sys.exit(run_cases(cases, 20_000))
