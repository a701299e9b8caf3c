"""Kernels: every operation twice, in torch (`reference`) and in Triton (`fused`), behind `ops.Ops`."""

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kernels.ops import Ops


def load(backend: str) -> "Ops":
    """The operations of one backend: "torch" or "triton". Only the backend asked for is imported."""
    module = {"torch": "kernels.reference", "triton": "kernels.fused"}[backend]
    return cast("Ops", importlib.import_module(module))
