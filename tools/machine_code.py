"""What Triton makes of a kernel for a GPU that is not here: compiled ahead of time, and read as machine code."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

TENSOR_CORE = re.compile(r"(?<![.\w])[A-Z]+MMA\b")  # not HFMA2.MMA, which is none


def compile_for(target: str, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The kernel that `function[grid](*args, **options)` would get on the target. By internals of Triton (3.6, 3.9)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    backend = make_backend(gpu)
    defaults = {"debug": False, "instrumentation_mode": "", "fpsan_homomorphic_casts": False}
    known = backend.parse_options({}).__dict__  # by this version of Triton
    options = {**{name: value for name, value in defaults.items() if name in known}, **options}
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, bound_options = bind(*args, **options)
    parsed, *specialized = function._pack_args(backend, options, bound, specialization, bound_options)
    return triton.compile(ASTSource(function, *specialized), target=gpu, options=parsed.__dict__)


def read_nvidia(kernel: Any, loop: int | None) -> tuple[dict[str, Any], int]:
    """-> the columns, and the number of instructions: of a loop over pages, or all."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}  # cuobjdump calls nvdisasm
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "-sass", "--dump-resource-usage", file.name]
        text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+)", text)
    assert usage, f"no resource usage in the output of {' '.join(command)}"
    lines = [(int(at, 16), code) for at, code in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]
    body = [code for _, code in lines] if loop is None else _page_loop(lines, loop)
    bits: Counter[int] = Counter()
    for code in body:
        # LDG: to registers, LDGSTS: asynchronous, to shared memory
        if load := re.search(r"\bLDG(?:STS)?\.(\S+)", code):
            width = re.search(r"\b(128|64|[SU]?16|[SU]?8)\b", load[1])
            size = int(width[1].lstrip("SU")) if width else 32
            bits[size] += size
    spills = [len(re.findall(r"\b(?:LDL|STL)\b", part)) for part in (text, "\n".join(body))]
    return _columns(int(usage[1]), spills, bits, TENSOR_CORE.search(text)), len(body)


def _columns(registers: int, spills: list[int], bits: Counter[int], mma: re.Match[str] | None) -> dict[str, Any]:
    load_bits = max(bits, key=lambda size: bits[size], default=None)
    spilled = {"spills": spills[0], "loop_spills": spills[-1]}
    return {"registers": registers, **spilled, "load_bits": load_bits, "tensor_core": mma and mma[0]}


def _page_loop(lines: list[tuple[int, str]], index: int) -> list[str]:
    """One of the loops that use tensor cores, in the order of their ends. The first goes over whole exact pages, or, in
    prefill where there are any, over compressed ones; those are decode's second."""
    for last, (at, code) in enumerate(lines):
        jump = re.search(r"\bBRA\b.*0x([0-9a-f]+)", code)
        if jump and int(jump[1], 16) < at:
            body = [code for at, code in lines[: last + 1] if at >= int(jump[1], 16)]
            if any(map(TENSOR_CORE.search, body)):
                if index == 0:
                    return body
                index -= 1
    raise AssertionError("too few loops use tensor cores")


def read_amd(kernel: Any) -> dict[str, Any]:
    text = kernel.asm["amdgcn"]
    registers, *spilled = (
        int(re.findall(rf"\.{name}:\s+(\d+)", text)[0])
        for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    )
    sizes = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "ushort": 16, "ubyte": 8}
    bits: Counter[int] = Counter()
    for width in re.findall(r"\b(?:global|buffer)_load_([a-z0-9]+)", text):
        bits[sizes.get(width, 0)] += sizes.get(width, 0)
    return _columns(registers, [sum(spilled)], bits, re.search(r"\bv_mfma\w*", text))
