"""The Llama forward pass over a flat batch of tokens. What attention reads and where K/V are kept is the caller's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.ops import Ops
from models.llama.config import LlamaConfig
from models.llama.rope import rope_table

# attention(layer, q, k, v, cos_sin) -> [T, num_heads, head_dim]: rotates q and k by cos_sin, keeps k and v, attends.
# q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], cos_sin [T, head_dim] float32; q may be overwritten.
# Rotation is the callee's because one kernel rotates K and writes it to the cache.
Attention = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]


class LlamaWeights(nn.Module):
    """The parameters under the names that Hugging Face checkpoints give them. Built on the meta device, filled by
    `load_state_dict(strict=True, assign=True)`, consumed by `Llama`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = _Body(config)
        self.lm_head: _Parameters | None = None
        if not config.tie_word_embeddings:
            self.lm_head = _Parameters(config.vocab_size, config.hidden_size)


class _Parameters(nn.Module):
    """A weight and perhaps a bias, without data. torch's own modules would run their initialisers on the meta device,
    which takes 150 MB of imports."""

    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(shape, device="meta"))
        self.bias: Tensor | None = nn.Parameter(torch.empty(shape[:1], device="meta")) if bias else None


class _Body(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = _Parameters(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_LayerWeights(config) for _ in range(config.num_layers))
        self.norm = _Parameters(config.hidden_size)


class _LayerWeights(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = _Parameters(config.hidden_size)
        self.self_attn = _AttentionWeights(config)
        self.post_attention_layernorm = _Parameters(config.hidden_size)
        self.mlp = _MLPWeights(config)


class _AttentionWeights(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = _Parameters(queries, hidden, bias=bias)
        self.k_proj = _Parameters(keys, hidden, bias=bias)
        self.v_proj = _Parameters(keys, hidden, bias=bias)
        self.o_proj = _Parameters(hidden, queries, bias=bias)


class _MLPWeights(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = _Parameters(inner, hidden, bias=bias)
        self.up_proj = _Parameters(inner, hidden, bias=bias)
        self.down_proj = _Parameters(hidden, inner, bias=bias)


class _Linear:
    """Linear maps of one input, run as one product."""

    def __init__(self, ops: Ops, *parts: _Parameters) -> None:
        weights = [part.weight.detach() for part in parts]
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        self.weight = ops.pack_linear(torch.cat(weights) if len(parts) > 1 else weights[0])
        self.bias = torch.cat(biases) if biases else None
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.weight, self.bias) if x is not None)


class _Layer:
    """One decoder layer, its weights as the backend reads them fastest."""

    def __init__(self, weights: _LayerWeights, ops: Ops) -> None:
        attention, mlp = weights.self_attn, weights.mlp
        self.input_norm = weights.input_layernorm.weight.detach()
        self.qkv = _Linear(ops, attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = _Linear(ops, attention.o_proj)
        self.post_attention_norm = weights.post_attention_layernorm.weight.detach()
        self.gate_up = _Linear(ops, mlp.gate_proj, mlp.up_proj)
        self.down = _Linear(ops, mlp.down_proj)

    @property
    def nbytes(self) -> int:
        norms = self.input_norm.nbytes + self.post_attention_norm.nbytes
        return norms + sum(linear.nbytes for linear in (self.qkv, self.output, self.gate_up, self.down))


class Llama:
    """A Llama ready to run: forward(input_ids, positions, attention) -> hidden states, logits(hidden) -> logits."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, ops: Ops, max_positions: int) -> None:
        """Takes the parameters out of `weights` layer by layer, so that no more than one layer is held twice."""
        self.config = config
        self.ops = ops
        self.layers: list[_Layer] = []
        for i, layer in enumerate(weights.model.layers):
            assert isinstance(layer, _LayerWeights), "weights were consumed already"
            self.layers.append(_Layer(layer, ops))
            weights.model.layers[i] = nn.Identity()
        self.embedding = weights.model.embed_tokens.weight.detach()
        self.norm = weights.model.norm.weight.detach()
        self.head = _Linear(ops, weights.lm_head or weights.model.embed_tokens)
        self.rope = rope_table(config, max_positions, self.embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are held: a tied head that needs its own layout counts twice."""
        shared = self.head.weight.data_ptr() == self.embedding.data_ptr() if not self.head.weight.is_mkldnn else False
        head = 0 if shared else self.head.nbytes
        return self.embedding.nbytes + self.norm.nbytes + head + sum(layer.nbytes for layer in self.layers)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states after the final norm, [T, hidden_size].

        input_ids, positions [T] int64: the tokens of all sequences, flattened without padding.
        """
        config, ops, eps = self.config, self.ops, self.config.rms_norm_eps
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        residual = self.embedding[input_ids]
        cos_sin = self.rope[positions]
        hidden = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for i, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            qkv = layer.qkv(hidden).view(len(input_ids), sum(heads), config.head_dim)
            q, k, v = qkv.split(heads, dim=1)
            attended = attention(i, q, k, v, cos_sin)
            hidden = layer.output(attended.flatten(1))
            hidden = ops.add_rms_norm(hidden, residual, layer.post_attention_norm, eps)
            gate, up = layer.gate_up(hidden).chunk(2, dim=1)
            hidden = layer.down(ops.silu_mul(gate, up))
            hidden = ops.add_rms_norm(hidden, residual, next_norm, eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, [rows, vocab_size] float32, of rows of hidden states."""
        return self.head(hidden).float()
