"""Scales, zeros and norms with which the whole model predicts what the source predicts (EfficientQAT's second phase,
arXiv 2407.11062): the codes stay, AdamW lowers KL(source || ours), one window of the text a step.

What is tuned is rounded to what the checkpoint holds before it is used, and the gradient passes by the rounding. The
windows come in an order that a fixed seed gives. Held are the source, the weights in float32 and what the gradient
needs of one window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference_linear
from kernels.ops import QuantizedWeight
from kernels.reference_linear import by_input
from models.llama.config import LlamaConfig
from tools.quantize_gptq import Read, Stream, names_of_layer

_RATE = 1e-3  # of a norm and of a scale, and, of a zero, of its scale: a step at most, where steps are largest
_WARM_UP = 10  # steps
_BETAS = 0.9, 0.95

Weights = dict[str, Tensor]


def tune(
    read: Read, config: LlamaConfig, found: dict[str, QuantizedWeight], text: list[Tensor], steps: int,
    done: Callable[[], Any],
) -> dict[str, QuantizedWeight | Tensor]:  # fmt: skip
    """The weights `found` with other scales and zeros, and the norms. text: ids of each window. done: after a step."""
    names = [f"model.layers.{i}.{name}" for i in range(config.num_layers) for name in names_of_layer()]
    names += ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    source = {name: tensor for name in names if (tensor := read(name)) is not None}
    ours = _Ours(source, found)
    optimizer = torch.optim.AdamW(ours.changes.values(), lr=_RATE, betas=_BETAS, weight_decay=0, eps=1e-12)
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min((step + 1) / _WARM_UP, 1) * (1 - step / steps)
        ids = text[order[step % len(order)]]
        with torch.no_grad():
            wanted = _predict(config, ids, source)
        loss = F.kl_div(_predict(config, ids, ours.weights()), wanted, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done()
    return ours.tuned()


def _predict(config: LlamaConfig, ids: Tensor, weights: Weights) -> Tensor:
    """Logarithms of probabilities [tokens, vocab_size] float32."""
    embedding = weights["model.embed_tokens.weight"]
    stream = Stream(config, [embedding[ids].float()])
    for i in range(config.num_layers):
        present = ((name, weights.get(f"model.layers.{i}.{name}")) for name in names_of_layer())
        stream.weights = {name: tensor.float() for name, tensor in present if tensor is not None}
        stream.pass_layer()
    stream.weights = {"norm.weight": weights["model.norm.weight"].float()}
    return F.linear(stream.normed("norm")[0], weights.get("lm_head.weight", embedding).float()).log_softmax(-1)


class _Ours:
    """The quantised model, and what is changed of it."""

    def __init__(self, source: Weights, found: dict[str, QuantizedWeight]) -> None:
        self.found, self.fixed = found, dict(source)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in source:
                self.fixed[name] = reference_linear.dequantize(reference_linear.quantize(source[name], 8, 0))
        self.codes = {name: _codes(weight) for name, weight in found.items()}
        self.norms = {name: tensor for name, tensor in source.items() if name.endswith("norm.weight")}
        shapes = {(name, kind): weight.scales.shape for name, weight in found.items() for kind in ("scale", "zero")}
        shapes |= {(name, "norm"): tensor.shape for name, tensor in self.norms.items()}
        self.changes = {key: torch.zeros(shape, requires_grad=True) for key, shape in shapes.items()}

    def _norm(self, name: str) -> Tensor:
        before = self.norms[name]
        return _rounded(before.float() * (1 + self.changes[name, "norm"]), before.dtype)

    def _scales_zeros(self, name: str) -> tuple[Tensor, Tensor]:
        weight = self.found[name]
        assert weight.zeros is not None
        scales = weight.scales.float()
        return (
            _rounded(scales * self.changes[name, "scale"].exp(), torch.bfloat16),
            _rounded(weight.zeros.float() + scales * self.changes[name, "zero"], torch.bfloat16),
        )

    def weights(self) -> Weights:
        """float32, differentiable by the changes."""
        weights = self.fixed | {name: self._norm(name) for name in self.norms}
        for name, codes in self.codes.items():
            scales, zeros = (by_input(x, self.found[name].group, codes) for x in self._scales_zeros(name))
            weights[name] = torch.addcmul(zeros, codes.float(), scales)
        return weights

    @torch.no_grad()
    def tuned(self) -> dict[str, QuantizedWeight | Tensor]:
        result: dict[str, QuantizedWeight | Tensor] = {}
        for name, weight in self.found.items():
            scales, zeros = (x.bfloat16() for x in self._scales_zeros(name))
            result[name] = QuantizedWeight(weight.codes, scales, zeros, weight.group)
        return result | {name: self._norm(name).to(tensor.dtype) for name, tensor in self.norms.items()}


def _codes(weight: QuantizedWeight) -> Tensor:
    """[out, in] int8, from -8 to 7: the weight as it is where scales are 1 and zeros 0."""
    scales = torch.ones_like(weight.scales)
    return reference_linear.dequantize(weight._replace(scales=scales, zeros=scales - 1)).to(torch.int8)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x + (x.to(dtype).float() - x).detach()
