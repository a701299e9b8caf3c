"""Codes of 4 bits whose errors make up for each other on a text: GPTQ (arXiv 2210.17323), layer by layer.

    exact   --[ layer 0 ]----[ layer 1 ]-- ...     the text, through the source's weights
    ours    --[ layer 0']----[ layer 1']-- ...     and through those that have their codes already, in step

target  of each linear map: what is near to its weight and makes of our inputs what the source makes of its own (GPTAQ,
        arXiv 2504.02692)
codes   scales and zeros as without a text; then the inputs in the order of their importance: the nearest code, and
        what is lost goes to the inputs that are still to come, so that X w changes least
rounds  the scales and zeros that fit these codes best, then each code again, beside all others

A token counts by its direction: the few with activations hundreds of times as large would leave no other a say. One
layer of the source is held, and the tokens of both streams; nothing is drawn by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference_linear
from kernels.ops import QuantizedWeight
from kernels.reference_linear import by_input, fit, pack_int4
from models.llama.config import LlamaConfig
from models.llama.rope import rope_table

_DAMPING = 0.01  # of the mean of the moment's diagonal, added to it
_RIDGE = 0.5  # the same, where a target is sought: what holds it to the weight
_BLOCK = 64  # inputs whose losses are passed on together
_ROUNDS = 2
_CONTEXT = 512  # tokens of a window
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUTPUT, _GATE, _UP, _DOWN = "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
MAPS = (*_QKV, _OUTPUT, _GATE, _UP, _DOWN)  # of a layer
_NORMS = "input_layernorm", "post_attention_layernorm"

Read = Callable[[str], Tensor | None]  # a tensor of the source by its name; None: it has none


class Stream:
    """The text on its way through the layers, window by window; of one layer the weights that it meets, float32."""

    def __init__(self, config: LlamaConfig, hidden: list[Tensor]) -> None:
        self.config, self.hidden = config, hidden  # [tokens, hidden_size] each
        self.weights: dict[str, Tensor] = {}  # by names without the layer's
        self.rope = rope_table(config, max(map(len, hidden)))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def normed(self, name: str) -> list[Tensor]:
        weight = self.weights[f"{name}.weight"]
        return [F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps) for x in self.hidden]

    def attend(self, x: Tensor) -> Tensor:
        """[tokens, hidden_size] after the norm -> [tokens, heads * head_dim], causal."""
        q, k, v = (self.linear(name, x).unflatten(1, (-1, self.config.head_dim)).transpose(0, 1) for name in _QKV)
        cos, sin = self.rope[: len(x)].chunk(2, 1)
        q, k = (
            torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
            for low, high in (y.chunk(2, -1) for y in (q, k))
        )
        k, v = (y.repeat_interleave(len(q) // len(k), 0) for y in (k, v))
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1).flatten(1)

    def gated(self, x: Tensor) -> Tensor:
        return F.silu(self.linear(_GATE, x)) * self.linear(_UP, x)

    def add(self, name: str, inputs: list[Tensor]) -> None:
        self.hidden = [hidden + self.linear(name, x) for hidden, x in zip(self.hidden, inputs, strict=True)]

    def pass_layer(self) -> None:
        for norm, _, between, last in _HALVES:
            self.add(last, [between(self, x) for x in self.normed(norm)])


# The halves of a layer: norm, the maps of what it gives, what is computed with these, and the map that is added.
_HALVES = (_NORMS[0], _QKV, Stream.attend, _OUTPUT), (_NORMS[1], (_GATE, _UP), Stream.gated, _DOWN)


def names_of_layer() -> list[str]:
    """Of the tensors that a layer may have, without the layer's."""
    return [f"{name}.weight" for name in (*_NORMS, *MAPS)] + [f"{name}.bias" for name in MAPS]


def windows(texts: list[list[int]], tokens: int, context: int) -> list[Tensor]:
    """About `tokens` ids, an equal share of each text, none empty: windows of at most `context`, spread over it."""
    found: list[Tensor] = []
    for ids in texts:
        parts = torch.tensor(ids).split(min(_CONTEXT, context, tokens))
        count = min(max(round(tokens / len(texts) / len(parts[0])), 1), len(parts))
        found += [parts[i * len(parts) // count] for i in range(count)]
    return found


def quantize(
    read: Read, config: LlamaConfig, group: int, text: list[Tensor], done: Callable[[], Any]
) -> dict[str, QuantizedWeight]:
    """The weights of all linear maps of the layers, by their names. text: ids [tokens] of each window. done: called
    after each map."""
    embedding = read("model.embed_tokens.weight")
    assert embedding is not None
    rows = [embedding[ids].float() for ids in text]
    del embedding
    exact = Stream(config, rows)
    ours = Stream(config, [reference_linear.dequantize(reference_linear.quantize(x, 8, 0)) for x in rows])
    streams, found = (exact, ours), {}
    for i in range(config.num_layers):
        tensors = {name: read(f"model.layers.{i}.{name}") for name in names_of_layer()}
        exact.weights = {name: tensor.float() for name, tensor in tensors.items() if tensor is not None}
        ours.weights = dict(exact.weights)
        for norm, first, between, last in _HALVES:
            inputs = [stream.normed(norm) for stream in streams]
            for maps in (first, (last,)):
                if maps is not first:
                    inputs = [[between(stream, x) for x in xs] for stream, xs in zip(streams, inputs, strict=True)]
                moment, target = _moments(inputs)
                for name in maps:
                    weight = exact.weights[f"{name}.weight"]
                    codes = _encode(target(weight), group, moment)
                    found[f"model.layers.{i}.{name}.weight"] = codes
                    ours.weights[f"{name}.weight"] = reference_linear.dequantize(codes)
                    done()
            for stream, xs in zip(streams, inputs, strict=True):
                stream.add(last, xs)
    return found


def _moments(inputs: list[list[Tensor]]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Of what a linear map gets, (exact, ours): X^T X [in, in] of ours; and what makes the target of its weight."""
    size = inputs[1][0].shape[1]
    moment, away = torch.zeros(2, size, size)
    for wanted, x in zip(*inputs, strict=True):
        length = (x.norm(dim=1, keepdim=True) / size**0.5).clamp_min(1e-6)
        x = x / length
        moment.addmm_(x.T, x)
        away.addmm_(x.T, wanted / length - x)
    factor = torch.linalg.cholesky(_damped(moment, _RIDGE))
    return moment, lambda weight: weight + torch.cholesky_solve(away @ weight.T, factor).T


def _damped(moment: Tensor, by: float) -> Tensor:
    return moment + torch.eye(len(moment)) * (by * moment.diagonal().mean().clamp_min(1e-6))


def _encode(weight: Tensor, group: int, moment: Tensor) -> QuantizedWeight:
    """A weight [out, in] float32 in 4 bits. moment: X^T X."""
    scales, zeros = fit(weight, group)
    damped = _damped(moment, _DAMPING)
    order = damped.diagonal().argsort(descending=True)
    codes = _in_turn(weight, scales, zeros, group, damped, order)
    for _ in range(_ROUNDS):
        scales, zeros = _refit(weight, codes, scales, zeros, group, damped)
        codes = _again(weight, codes, scales, zeros, group, damped, order)
    return QuantizedWeight(pack_int4(codes, group), scales, zeros, group)


def _by_row(order: Tensor, group: int, weight: Tensor, scales: Tensor, zeros: Tensor) -> list[Tensor]:
    """Weight, scales and zeros [in, out], the inputs in this order: a row is one input's."""
    found = weight, by_input(scales, group, weight), by_input(zeros, group, weight)
    return [x[:, order].T.contiguous() for x in found]


def _in_turn(weight: Tensor, scales: Tensor, zeros: Tensor, group: int, moment: Tensor, order: Tensor) -> Tensor:
    """Codes [out, in]: GPTQ."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    rest, steps, middles = _by_row(order, group, weight, scales, zeros)
    codes = torch.empty_like(rest)
    for first in range(0, len(rest), _BLOCK):
        end = min(first + _BLOCK, len(rest))
        lost = rest.new_empty(end - first, rest.shape[1])
        for i in range(first, end):
            codes[i] = ((rest[i] - middles[i]) / steps[i]).round_().clamp_(-8, 7)
            lost[i - first] = (rest[i] - codes[i] * steps[i] - middles[i]) / upper[i, i]
            rest[i + 1 : end].addr_(upper[i, i + 1 : end], lost[i - first], alpha=-1)
        rest[end:].addmm_(upper[first:end, end:].T, lost, alpha=-1)
    return codes[order.argsort()].T.contiguous()


def _refit(
    weight: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, group: int, moment: Tensor
) -> tuple[Tensor, Tensor]:
    """The scales and zeros [out, groups] of the codes [out, in] by which X w changes least: of each output a system of
    2 * groups equations. The old ones where a scale would not be positive."""

    def sums(x: Tensor) -> Tensor:
        """[.., in] -> [.., groups]"""
        return torch.stack([part.sum(-1) for part in x.split(group, -1)], -1)

    outputs, groups = scales.shape
    system = weight.new_empty(outputs, 2, groups, 2, groups)
    for i, (part, rows) in enumerate(zip(codes.split(group, 1), moment.split(group), strict=True)):
        reach = part @ rows
        system[:, 0, i, 0], system[:, 0, i, 1] = sums(reach * codes), sums(reach)
    system[:, 1, :, 0] = system[:, 0, :, 1].transpose(1, 2)
    system[:, 1, :, 1] = sums(sums(moment).T.contiguous())
    system = system.flatten(3).flatten(1, 2)
    wanted = weight @ moment
    right = torch.cat([sums(wanted * codes), sums(wanted)], 1)
    system.diagonal(dim1=1, dim2=2).add_(1e-6 * system.diagonal(dim1=1, dim2=2).mean(1, keepdim=True))
    found = torch.linalg.solve(system, right).bfloat16().view(outputs, 2, groups)
    good = (found[:, 0] > 0).all(1, keepdim=True) & found.isfinite().all(2).all(1, keepdim=True)
    return torch.where(good, found[:, 0], scales), torch.where(good, found[:, 1], zeros)


def _again(
    weight: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, group: int, moment: Tensor, order: Tensor
) -> Tensor:
    """The codes [out, in], each set in turn to what is best beside the others as they stand."""
    rest, steps, middles = _by_row(order, group, weight, scales, zeros)
    codes, moment = codes[:, order].T.contiguous(), moment[order][:, order].contiguous()
    pull = moment @ (rest - codes * steps - middles)
    for first in range(0, len(codes), _BLOCK):
        some = slice(first, min(first + _BLOCK, len(codes)))
        before, near, block = codes[some].clone(), pull[some].clone(), moment[some, some]
        for i, own in enumerate(block):
            better = (before[i] + near[i] / (own[i] * steps[first + i])).round_().clamp_(-8, 7)
            near.addr_(own, (better - before[i]) * steps[first + i], alpha=-1)
            codes[first + i] = better
        pull.addmm_(moment[:, some], (codes[some] - before) * steps[some], alpha=-1)
    return codes[order.argsort()].T.contiguous()
