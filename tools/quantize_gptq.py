"""Codes of 4 bits whose errors make up for each other on a text: GPTQ (arXiv 2210.17323).

inputs  the checkpoint reads the text, in float32; X^T X of what each linear map gets is summed, a token counting
        by its direction: the few tokens with activations hundreds of times as large would leave no other a say
codes   scales and zeros as without a text; then the inputs in the order of their importance: the nearest code, and
        what is lost goes to the inputs that are still to come, so that X w changes least
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine import LLM, SamplingParams
from kernels import reference
from kernels.ops import QuantizedWeight
from kernels.reference_linear import by_input, fit, pack_int4

_DAMPING = 0.01  # of the mean of the diagonal, added to it
_BLOCK = 64  # inputs whose losses are passed on together
_CONTEXT = 1024  # tokens of a window


class _Recorder:
    """The operations, which also sum what `linear` gets."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        directions = x / x.norm(dim=1, keepdim=True).clamp_min(1e-6) * x.shape[1] ** 0.5
        total = self.sums.setdefault(id(weight), x.new_zeros(x.shape[1], x.shape[1]))
        total.addmm_(directions.T, directions)
        return reference.linear(x, weight, bias)


def moments(model: str, texts: list[str], tokens: int) -> dict[str, Tensor]:
    """X^T X [in, in] of the layers' weights, by their names, over the texts' first tokens, so many in all."""
    llm = LLM(model, dtype="float32", backend="torch", device="cpu", enable_prefix_caching=False)
    assert llm.tokenizer is not None
    recorder, context = _Recorder(), min(_CONTEXT, llm.max_model_len - 1)
    llm._model.ops = recorder
    windows = []
    for text in texts:
        ids = llm.tokenizer.encode(text[: 16 * tokens])[: max(tokens // len(texts), 1)]
        windows += [ids[first : first + context] for first in range(0, len(ids), context)]
    llm.generate(windows, SamplingParams(max_tokens=1, ignore_eos=True))
    found: dict[str, Tensor] = {}
    for i, layer in enumerate(llm._model.layers):
        for (weight, _), names in (
            (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.output, ("self_attn.o_proj",)),
            (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.down, ("mlp.down_proj",)),
        ):
            found |= {f"model.layers.{i}.{name}.weight": recorder.sums[id(weight)] for name in names}
    return found


def quantize(weight: Tensor, group: int, moment: Tensor) -> QuantizedWeight:
    """A weight [out, in] in 4 bits. moment: X^T X."""
    weight = weight.float()
    scales, zeros = fit(weight, group)
    damped = moment + torch.eye(len(moment)) * (_DAMPING * moment.diagonal().mean())
    order = damped.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    # By input first: a row is then one input's.
    rest, steps, middles = (
        x[:, order].T.contiguous() for x in (weight, by_input(scales, group, weight), by_input(zeros, group, weight))
    )
    codes = torch.empty_like(rest)
    for first in range(0, len(rest), _BLOCK):
        end = min(first + _BLOCK, len(rest))
        lost = rest.new_empty(end - first, rest.shape[1])
        for i in range(first, end):
            codes[i] = ((rest[i] - middles[i]) / steps[i]).round_().clamp_(-8, 7)
            lost[i - first] = (rest[i] - codes[i] * steps[i] - middles[i]) / upper[i, i]
            rest[i + 1 : end].addr_(upper[i, i + 1 : end], lost[i - first], alpha=-1)
        rest[end:].addmm_(upper[first:end, end:].T, lost, alpha=-1)
    return QuantizedWeight(pack_int4(codes[order.argsort()].T, group), scales, zeros, group)
