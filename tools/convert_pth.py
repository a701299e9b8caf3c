"""Reads a Llama out of Meta's folder: consolidated.00.pth, .01.pth, ... beside params.json.

The .pth files are pickles. Only torch's restricted loader touches them (weights_only: tensors and plain containers, no
calls into other code), and they are mapped, so that a model larger than memory can be converted.

Each file holds a slice of every matrix, from training on several GPUs; which way it was cut shows in the shapes:

    rows     wq wk wv w1 w3 output, and Llama 3's tok_embeddings     whole    the norms
    columns  wo w2, and Llama 1 and 2's tok_embeddings
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import ModelFormatError
from tools.convert_tokenizer import TIKTOKEN_LINE, VocabularyError, from_tiktoken, llama3_specials
from tools.convert_writer import ConvertError, Plan, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from tools.convert_writer import Piece

MAX_TOKENIZER_BYTES = 64 << 20
_BLOCK = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_UNSUPPORTED = ("moe", "sliding_window", "quantization_args", "lora_args", "vision_chunk_size")


def plan_pth(directory: Path, context_length: int | None = None) -> Plan:
    """What to write for Meta's folder. context_length: what the model was trained for, where the guess is wrong.

    Raises ModelFormatError if the files are not that, or do not fit together; ConvertError if torch is too old.
    """
    from models.files import read_object

    where = directory / "params.json"
    params = read_object(where)
    for key in _UNSUPPORTED:
        if params.get(key):
            raise ModelFormatError(f"{where}: {key} is not supported")
    shards = [_load(path) for path in _shard_files(directory)]
    for i, shard in enumerate(shards):
        if differ := sorted(shard.keys() ^ shards[0].keys()):
            raise ModelFormatError(f"{directory}: file {i} has not the tensors of file 0: {', '.join(differ[:40])}")
    config, notes = _config(where, params, shards, context_length)
    layout = _layout(config)
    if missing := sorted(layout.keys() - shards[0].keys()):
        raise ModelFormatError(f"{directory}: tensors are missing: {', '.join(missing[:40])}")
    if extra := sorted(name for name in shards[0].keys() - layout.keys() if not _is_left_out(name, config)):
        raise ModelFormatError(f"{directory}: unknown tensors: {', '.join(extra[:40])}")
    heads = {"attention.wq": config["num_attention_heads"], "attention.wk": config["num_key_value_heads"]}
    weights = []
    for ours, (theirs, shape) in layout.items():
        parts = [shard[ours] for shard in shards]
        kind = ours.split(".", 2)[-1].removesuffix(".weight")
        dim = _cut(directory, ours, parts, shape)
        if kind in heads and any(part.shape[0] % config["head_dim"] for part in parts):
            raise ModelFormatError(f"{directory}: {ours} is cut inside a head")
        weights.append(Weight(theirs, shape, partial(_pieces, parts, dim), heads.get(kind, 0)))
    files = _tokenizer(directory, config, llama3="3.1" if config["rope_scaling"] else "3")
    return Plan(directory, config, files, weights, notes)


def _shard_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("consolidated.*.pth"))
    wanted = [f"consolidated.{i:02d}.pth" for i in range(len(files))]
    names = {path.name for path in files}
    if missing := [name for name in wanted if name not in names]:
        raise ModelFormatError(f"{directory}: {', '.join(missing)} missing beside {', '.join(sorted(names))}")
    return files


def _load(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, mapped. Raises ModelFormatError; no code from the file is run."""
    import torch

    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 6):  # before it, weights_only could be got round (CVE-2025-32434)
        raise ConvertError(f"torch {torch.__version__} does not read pickles safely: need torch 2.6 or later")
    if not path.is_file():
        raise ModelFormatError(f"{path}: not a regular file")
    with path.open("rb") as file:
        begin = file.read(8)
    if begin == b"version ":
        raise ModelFormatError(f"{path}: a Git LFS pointer, not the file itself: run `git lfs pull`")
    try:
        with warnings.catch_warnings():  # of what is refused or read in the next moment
            warnings.simplefilter("ignore")
            state: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # damaged files and forbidden pickles raise whatever the reader met
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = next((line for line in lines if "nsupported" in line), lines[0])
        raise ModelFormatError(f"{path}: refused, not a plain dictionary of tensors: {reason:.300}") from None
    if not isinstance(state, dict) or not state:
        raise ModelFormatError(f"{path}: holds {type(state).__name__}, not a dictionary of tensors")
    size = path.stat().st_size
    supported = (torch.float32, torch.float16, torch.bfloat16)
    for name, tensor in state.items():
        if not isinstance(name, str) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise ModelFormatError(f"{path}: {name!r:.80} is {type(tensor).__name__}, not a tensor with a name")
        if tensor.dtype not in supported or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ModelFormatError(
                f"{path}: {name!r:.80} is {tensor.dtype}; float32, float16 and bfloat16 are supported"
            )
        # Strides of 0 make much of little: such a tensor would be written out in full.
        if tensor.numel() * tensor.element_size() > size:
            raise ModelFormatError(f"{path}: {name!r:.80} is not stored as it is: shape {tuple(tensor.shape)}")
    return {name: tensor.detach() for name, tensor in state.items()}


def _config(
    where: Path, params: dict[str, Any], shards: list[dict[str, Tensor]], context_length: int | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """config.json from params.json and the tensors, and what had to be assumed."""

    def number(key: str, kind: type, default: Any = None) -> Any:
        value = params.get(key)
        value = default if value is None else value
        right = type(value) is kind or (type(value) is int and kind is float)
        if not (right and 0 < value < 1e12):  # so that NaN is refused
            raise ModelFormatError(f"{where}: {key} must be a positive {kind.__name__}, got {value!r:.80}")
        return kind(value)

    dim, layers, heads = number("dim", int), number("n_layers", int), number("n_heads", int)
    kv_heads = number("n_kv_heads", int, heads)
    head_dim = number("head_dim", int, dim // heads)
    if heads % kv_heads or head_dim % 2 or ("head_dim" not in params and dim % heads):
        raise ModelFormatError(f"{where}: {heads} heads and {kv_heads} KV heads do not fit {dim} hidden units")
    if layers > len(shards[0]):  # what the layout of 10^11 layers would need is not built
        raise ModelFormatError(f"{where}: {layers} layers, but {len(shards[0])} tensors")
    vocab = _rows(where, shards, "output.weight" if "output.weight" in shards[0] else "tok_embeddings.weight", dim)
    if params.get("vocab_size", -1) not in (-1, vocab):
        raise ModelFormatError(f"{where}: vocab_size is {params['vocab_size']!r}, the tensors have {vocab} tokens")
    inner = _rows(where, shards, "layers.0.feed_forward.w1.weight", dim)
    if params.get("multiple_of") is not None:
        multiple = number("multiple_of", int)
        wanted = int(number("ffn_dim_multiplier", float, 1.0) * int(8 * dim / 3))
        wanted = -(-wanted // multiple) * multiple
        if wanted != inner:
            raise ModelFormatError(f"{where}: the feed-forward width comes to {wanted}, the tensors have {inner}")
    theta = number("rope_theta", float, 10000.0)
    scaling = None
    if params.get("use_scaled_rope"):
        scaling = {
            "rope_type": "llama3",
            "factor": number("rope_scaling_factor", float, 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": number("rope_high_freq_factor", float, 4.0),
            "original_max_position_embeddings": 8192,
        }
    notes: tuple[str, ...] = ()
    if context_length is None:
        context_length, name = _trained_context(shards[0].keys(), theta, scaling is not None)
        notes = (
            f"params.json does not say the context length: {context_length} tokens were taken, those of {name}; "
            "--context-length sets another",
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context_length,
        "rms_norm_eps": number("norm_eps", float),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": _is_tied(shards),
    }, notes


def _trained_context(names: Iterable[str], theta: float, scaled: bool) -> tuple[int, str]:
    """Tokens, and the model that was recognised."""
    if scaled:
        return 131072, "Llama 3.1 and later"
    if theta == 500000.0:
        return 8192, "Llama 3"
    if theta == 1000000.0:
        return 16384, "Code Llama"
    if any(name.endswith("inner_attention.rope.freqs") for name in names):  # later files have one for all layers
        return 2048, "Llama 1"
    return 4096, "Llama 2"


def _rows(where: Path, shards: list[dict[str, Tensor]], name: str, columns: int) -> int:
    """Rows of a matrix whose columns are known, whichever way it was cut."""
    parts = [shard.get(name) for shard in shards]
    if any(part is None or part.dim() != 2 for part in parts):
        raise ModelFormatError(f"{where.parent}: {name} is missing, or no matrix")
    shapes = [tuple(part.shape) for part in parts if part is not None]
    return sum(rows for rows, _ in shapes) if shapes[0][1] == columns else shapes[0][0]


def _is_tied(shards: list[dict[str, Tensor]]) -> bool:
    """Whether there is no head, or it repeats the embeddings, which then need not be written twice."""
    import torch

    if "output.weight" not in shards[0]:
        return True
    pairs = [
        (shard["output.weight"], shard["tok_embeddings.weight"]) for shard in shards if "tok_embeddings.weight" in shard
    ]
    return len(pairs) == len(shards) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def _is_left_out(name: str, config: dict[str, Any]) -> bool:
    """Tables that the engine computes itself, and a head that repeats the embeddings."""
    return name.endswith("rope.freqs") or (name == "output.weight" and config["tie_word_embeddings"])


def _layout(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Meta's name -> (Hugging Face name, shape of the whole)."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    out, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "attention.wq": (out, hidden),
        "attention.wk": (kv, hidden),
        "attention.wv": (kv, hidden),
        "attention.wo": (hidden, out),
        "feed_forward.w1": (inner, hidden),
        "feed_forward.w2": (hidden, inner),
        "feed_forward.w3": (inner, hidden),
        "attention_norm": (hidden,),
        "ffn_norm": (hidden,),
    }
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "tok_embeddings.weight": ("model.embed_tokens.weight", (vocab, hidden)),
        "norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        names["output.weight"] = ("lm_head.weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        for ours, shape in shapes.items():
            names[f"layers.{layer}.{ours}.weight"] = (f"model.layers.{layer}.{_BLOCK[ours]}.weight", shape)
    return names


def _cut(directory: Path, name: str, parts: list[Tensor], shape: tuple[int, ...]) -> int | None:
    """The dimension that the parts are slices along; None if each is the whole."""
    import torch

    shapes = [tuple(part.shape) for part in parts]
    if all(part == shape for part in shapes) and (len(parts) == 1 or len(shape) == 1):
        if not all(torch.equal(part, parts[0]) for part in parts[1:]):
            raise ModelFormatError(f"{directory}: {name} should be the same in every file, and is not")
        return None
    if len(shape) == 2 and all(len(part) == 2 for part in shapes):
        rows, columns = zip(*shapes, strict=True)
        if sum(rows) == shape[0] and set(columns) == {shape[1]}:
            return 0
        by_head = name.endswith(("wq.weight", "wk.weight"))  # whose rows are put in another order
        if sum(columns) == shape[1] and set(rows) == {shape[0]} and not by_head:
            return 1
    raise ModelFormatError(f"{directory}: {name} has shapes {', '.join(map(str, shapes))}: not slices of {shape}")


def _pieces(parts: list[Tensor], dim: int | None) -> Iterator[Piece]:
    if dim is None:
        yield 0, 0, parts[0]
        return
    start = 0
    for part in parts:
        yield dim, start, part
        start += part.shape[dim]


def _tokenizer(directory: Path, config: dict[str, Any], llama3: str) -> dict[str, bytes | dict[str, Any]]:
    """The tokenizer's files by name; puts the ids of its control tokens into the config."""
    from sentencepiece import SentencePieceProcessor

    candidates = [directory / "tokenizer.model", directory.resolve().parent / "tokenizer.model"]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise ModelFormatError(f"{directory}: no tokenizer.model in it or beside it")
    with path.open("rb") as file:
        data = file.read(MAX_TOKENIZER_BYTES + 1)
    if len(data) > MAX_TOKENIZER_BYTES:
        raise ModelFormatError(f"{path}: larger than {MAX_TOKENIZER_BYTES >> 20} MB")
    files: dict[str, bytes | dict[str, Any]]
    if TIKTOKEN_LINE.match(data):
        specials = llama3_specials(llama3)
        try:
            content, size = from_tiktoken(data, specials)
        except VocabularyError as error:
            raise ModelFormatError(f"{path}: {error}") from None
        first = size - len(specials)
        bos, eos = first, first + 1
        ends = [eos] + [first + specials.index(name) for name in ("<|eom_id|>", "<|eot_id|>") if name in specials]
        files = {"tokenizer.json": content}
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        names = {"bos_token": specials[0], "eos_token": specials[1]}
    else:
        try:
            model = SentencePieceProcessor(model_proto=data)
            size, bos, eos = model.get_piece_size(), model.bos_id(), model.eos_id()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ModelFormatError(f"{path}: neither a sentencepiece model nor a tiktoken file: {error}") from None
        if min(size, bos + 1, eos + 1) < 1:
            raise ModelFormatError(f"{path}: a sentencepiece model without pieces, or without BOS and EOS")
        ends = [eos]
        files = {"tokenizer.model": data}
        settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
        names = {"bos_token": model.id_to_piece(bos), "eos_token": model.id_to_piece(eos)}
        if model.unk_id() >= 0:
            names["unk_token"] = model.id_to_piece(model.unk_id())
    if size > config["vocab_size"]:
        raise ModelFormatError(f"{path}: {size} tokens, the model has {config['vocab_size']}")
    config |= {"bos_token_id": bos, "eos_token_id": eos}
    settings |= {"add_bos_token": True, **names, "clean_up_tokenization_spaces": False}
    settings["model_max_length"] = config["max_position_embeddings"]
    generation = {"bos_token_id": bos, "eos_token_id": ends if len(ends) > 1 else eos}
    return {"generation_config.json": generation, **files, "tokenizer_config.json": settings}
