"""The Llama forward pass over a flat batch of tokens. What attention reads and where K/V are kept is the caller's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.ops import Ops, QuantizedWeight, Weight
from kernels.reference_linear import weight_of
from models.errors import require_config
from models.llama.config import LlamaConfig
from models.llama.rope import rope_table

# attention(layer, q, k, v, cos_sin) -> [T, num_heads, head_dim]: rotates q and k by cos_sin, keeps k and v, attends.
# q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], cos_sin [T, head_dim] float32; q may be overwritten.
# Rotation is the callee's because one kernel rotates K and writes it to the cache.
Attention = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]


class LlamaWeights(dict[str, Any]):
    """The parameters, each a `kernels.ops.Weight`, as `config.quantization` asks, under the names that Hugging Face
    checkpoints give them: on the meta device until `models.loader.load_weights` puts them in, consumed by `Llama`.
    Raises ConfigError."""

    def __init__(self, config: LlamaConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        linears = {  # of a layer: (outputs, inputs)
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}  # fmt: skip
        biased = ("self_attn.",) * config.attention_bias + ("mlp.",) * config.mlp_bias  # how names of those begin
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
        for layer in (f"model.layers.{i}" for i in range(config.num_layers)):
            shapes |= {f"{layer}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
            shapes |= {f"{layer}.{name}.weight": shape for name, shape in linears.items()}
            shapes |= {f"{layer}.{name}.bias": shape[:1] for name, shape in linears.items() if name.startswith(biased)}
        shapes["model.norm.weight"] = (hidden,)
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        for name, shape in shapes.items():
            self[name] = torch.empty(shape, device="meta")
            if config.quantization is not None and len(shape) == 2:
                wide = name in ("model.embed_tokens.weight", "lm_head.weight")
                self[name] = _empty(name, *shape, 0 if wide else config.quantization.group)

    def nbytes(self, itemsize: int) -> int:
        """As they are held, what is not quantised in elements of so many bytes."""
        return sum(w.numel() * itemsize if isinstance(w, Tensor) else w.nbytes for w in self.values())


def _empty(name: str, outputs: int, inputs: int, group: int) -> QuantizedWeight:
    """On the meta device, without values; of 8 bits where there is no group."""
    require_config(not group or inputs % 2 == 0, f"int4 needs an even number of inputs; use int8: {name} has", inputs)
    width, kind = (inputs // 2, torch.uint8) if group else (inputs, torch.int8)
    codes = torch.empty(outputs, width, dtype=kind, device="meta")
    scales = torch.empty(outputs, -(-inputs // (group or inputs)), dtype=torch.bfloat16, device="meta")
    return QuantizedWeight(codes, scales, scales if group else None, group or inputs)


def _joined(weights: list[Any]) -> Any:
    """Weights of the same inputs as one."""
    if len(weights) == 1:
        return weights[0]
    if isinstance(weights[0], Tensor):
        return torch.cat(weights)
    *parts, groups = zip(*weights, strict=True)
    return weight_of([torch.cat(part) for part in parts if part[0] is not None], groups[0])


class _Layer:
    """One decoder layer, its weights as the backend reads them fastest; they are taken out of `weights`."""

    def __init__(self, weights: LlamaWeights, prefix: str, ops: Ops) -> None:
        def linear(*names: str) -> tuple[Any, Tensor | None]:
            """Weight and bias of linear maps of one input, to be run as one product."""
            found = [weights.pop(f"{prefix}.{name}.weight") for name in names]
            biases = [weights.pop(key) for name in names if (key := f"{prefix}.{name}.bias") in weights]
            return ops.pack_linear(_joined(found)), _joined(biases) if biases else None

        self.input_norm = weights.pop(f"{prefix}.input_layernorm.weight")
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.output = linear("self_attn.o_proj")
        self.post_attention_norm = weights.pop(f"{prefix}.post_attention_layernorm.weight")
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")


class Llama:
    """A Llama ready to run: forward(input_ids, positions, attention) -> hidden states, logits(hidden) -> logits."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, ops: Ops, max_positions: int) -> None:
        """Takes the parameters out of `weights` layer by layer, so that no more than one layer is held twice."""
        self.config = config
        self.ops = ops
        self.nbytes = weights.nbytes(weights["model.norm.weight"].dtype.itemsize)  # as they are held
        self.layers = [_Layer(weights, f"model.layers.{i}", ops) for i in range(config.num_layers)]
        self.embedding = weights.pop("model.embed_tokens.weight")
        self.norm = weights.pop("model.norm.weight")
        head = weights.pop("lm_head.weight", self.embedding)
        self.head = ops.pack_linear(head)
        if head is self.embedding and self.head is not head:
            self.nbytes += head.nbytes  # tied, and in a layout of its own
        self.dtype, self.device = self.norm.dtype, self.norm.device
        self.rope = rope_table(config, max_positions, self.device)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states after the final norm, [T, hidden_size].

        input_ids, positions [T] int64: the tokens of all sequences, flattened without padding.
        """
        config, ops, eps = self.config, self.ops, self.config.rms_norm_eps
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        residual = self._embedded(input_ids)  # rounding it in every layer costs more than all other rounding
        cos_sin = self.rope[positions]
        hidden = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for i, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            qkv = ops.linear(hidden, *layer.qkv).view(len(input_ids), sum(heads), config.head_dim)
            q, k, v = qkv.split(heads, dim=1)
            hidden = ops.linear(attention(i, q, k, v, cos_sin).flatten(1), *layer.output)
            hidden = ops.add_rms_norm(hidden, residual, layer.post_attention_norm, eps)
            gate, up = ops.linear(hidden, *layer.gate_up).chunk(2, dim=1)
            hidden = ops.linear(ops.silu_mul(gate, up), *layer.down)
            hidden = ops.add_rms_norm(hidden, residual, next_norm, eps)
        return hidden

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """[T, hidden_size] float32."""
        embedding: Weight = self.embedding
        if isinstance(embedding, Tensor):
            return embedding[input_ids].float()
        return embedding.codes[input_ids] * embedding.scales[input_ids].float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, [rows, vocab_size] float32, of rows of hidden states."""
        return self.ops.linear(hidden, self.head).float()

    def exact_logits(self, hidden: Tensor) -> Tensor:
        """`logits` without the last rounding to the weights' dtype, for where they are compared; twice the work."""
        return self.ops.linear_float32(hidden, self.head)
