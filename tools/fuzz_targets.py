"""What `tools.fuzz` damages and loads: for each target the undamaged files, the entry, and the judgement."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch

from engine.tokenizer import load_tokenizer
from models.checkpoint import open_checkpoint
from models.files import read_object
from models.llama.config import LlamaConfig
from models.llama.model import LlamaWeights
from models.loader import check_fit, load_weights
from tools.fuzz_mutate import mutate_bytes, mutate_json, mutate_safetensors
from tools.gguf import GGUF

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "vocab_size": 40, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "float32", "sliding_window": None, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip
TEXTS = ("The stove was warm.", "  日本 😀\n", "</s><s>[INST] a1b2")


class Target(Protocol):
    def damage(self, rng: random.Random) -> None:
        """Write the files of one input."""

    def load(self) -> Any:
        """Through the public entry; what comes out."""

    def judge(self, loaded: Any) -> str:
        """equal, different, or silent."""


def make(name: str, directory: Path) -> Target:
    kinds: dict[str, Callable[[Path], Target]] = {
        "config": _Config,
        "header": _Header,
        "index": _Index,
        "tokenizer": _Tokenizer,
        "gguf": _Gguf,
    }
    return kinds[name](directory)


def _tensors() -> dict[str, torch.Tensor]:
    """Every tensor of CONFIG's model, all values different."""
    state = LlamaWeights(LlamaConfig.from_dict(CONFIG))
    generator = torch.Generator().manual_seed(1)
    return {name: torch.rand(value.shape, generator=generator) for name, value in state.items()}


def _load(directory: Path, config: LlamaConfig) -> dict[str, torch.Tensor]:
    module = LlamaWeights(config)
    load_weights(module, open_checkpoint(directory), torch.float32, torch.device("cpu"))
    return module


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Key of config.json, field of LlamaConfig, default.
_FIELDS = (
    ("vocab_size", "vocab_size", None), ("hidden_size", "hidden_size", None), ("rms_norm_eps", "rms_norm_eps", 1e-6),
    ("intermediate_size", "intermediate_size", None), ("num_hidden_layers", "num_layers", None),
    ("num_attention_heads", "num_heads", None), ("max_position_embeddings", "max_position_embeddings", 2048),
    ("tie_word_embeddings", "tie_word_embeddings", False), ("attention_bias", "attention_bias", False),
    ("mlp_bias", "mlp_bias", False),
)  # fmt: skip


class _Config:
    def __init__(self, directory: Path) -> None:
        self.file = directory / "config.json"
        self.right = LlamaConfig.from_dict(CONFIG)
        safetensors.torch.save_file(_tensors(), directory / "model.safetensors")
        self.tensors = open_checkpoint(directory)

    def damage(self, rng: random.Random) -> None:
        self.file.write_bytes(mutate_json(rng, CONFIG))

    def load(self) -> tuple[LlamaConfig, bool]:
        config = LlamaConfig.from_dict(read_object(self.file))
        small = config.num_layers <= 8
        if small:
            check_fit(LlamaWeights(config), self.tensors)
        return config, small

    def judge(self, loaded: tuple[LlamaConfig, bool]) -> str:
        config, fits = loaded
        if config == self.right:
            return "equal"
        raw = json.loads(self.file.read_bytes().decode("utf-8-sig"))
        for key, field, default in _FIELDS:
            said = raw.get(key)
            if getattr(config, field) != (default if said is None else said):
                return "silent"
        places = (raw, raw.get("rope_parameters"), raw.get("rope_scaling"))
        thetas = [place["rope_theta"] for place in places if place and place.get("rope_theta") is not None]
        if config.rope_theta != (thetas[0] if thetas else 10000.0):
            return "silent"
        shapes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers")
        if fits and any(getattr(config, name) != getattr(self.right, name) for name in shapes):
            return "silent"
        return "different"


class _Header:
    def __init__(self, directory: Path) -> None:
        self.directory, self.file = directory, directory / "model.safetensors"
        self.config = LlamaConfig.from_dict(CONFIG)
        self.right = _tensors()
        safetensors.torch.save_file(self.right, self.file, {"format": "pt"})
        whole = self.file.read_bytes()
        length = int.from_bytes(whole[:8], "little")
        self.header, self.data = json.loads(whole[8 : 8 + length]), whole[8 + length :]

    def damage(self, rng: random.Random) -> None:
        self.file.write_bytes(mutate_safetensors(rng, self.header, self.data))

    def load(self) -> dict[str, torch.Tensor]:
        return _load(self.directory, self.config)

    def judge(self, loaded: dict[str, torch.Tensor]) -> str:
        if _equal(loaded, self.right):
            return "equal"
        try:
            said = safetensors.torch.load_file(self.file)
        except Exception:  # the library's own kinds
            return "silent"
        said = {name: tensor.float() for name, tensor in said.items() if name in loaded}
        return "different" if _same_bits(loaded, said) else "silent"


def _same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal, NaN included: bytes read as another dtype make some."""
    return a.keys() == b.keys() and all(
        a[name].shape == b[name].shape and torch.equal(a[name].nan_to_num(7e33), b[name].nan_to_num(7e33)) for name in a
    )


class _Index:
    """Two shards, and a third with other values under the same names: only the index says which counts."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.file = directory, directory / "model.safetensors.index.json"
        self.config = LlamaConfig.from_dict(CONFIG)
        self.right = _tensors()
        names = list(self.right)
        half = len(names) // 2
        self.shards = {
            "model-00001-of-00002.safetensors": {name: self.right[name] for name in names[:half]},
            "model-00002-of-00002.safetensors": {name: self.right[name] for name in names[half:]},
            "other.safetensors": {name: value + 1 for name, value in self.right.items()},
        }
        for file, tensors in self.shards.items():
            safetensors.torch.save_file(tensors, directory / file)
        parts = {name: file for file, tensors in list(self.shards.items())[:2] for name in tensors}
        self.index: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": parts}

    def damage(self, rng: random.Random) -> None:
        index: Any = {**self.index, "weight_map": dict(self.index["weight_map"])}
        if rng.random() < 0.3:
            for name in rng.sample(list(index["weight_map"]), rng.randrange(1, 4)):
                index["weight_map"][name] = rng.choice([*self.shards, "none.safetensors", "../x.safetensors"])
        if rng.random() < 0.8:
            self.file.write_bytes(mutate_json(rng, index))
        else:
            self.file.write_text(json.dumps(index))

    def load(self) -> dict[str, torch.Tensor]:
        return _load(self.directory, self.config)

    def judge(self, loaded: dict[str, torch.Tensor]) -> str:
        if _equal(loaded, self.right):
            return "equal"
        said = json.loads(self.file.read_bytes().decode("utf-8-sig"))["weight_map"]
        expected = {name: self.shards[said[name]][name] for name in loaded}
        return "different" if _equal(loaded, expected) else "silent"


class _Tokenizer:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = _sentencepiece()
        self.files: dict[str, dict[str, Any]] = {
            "tokenizer_config.json": {
                "add_bos_token": True, "bos_token": "<s>", "eos_token": {"content": "</s>"}, "legacy": False,
                "tokenizer_class": "LlamaTokenizer", "additional_special_tokens": ["<|im_end|>"],
                "added_tokens_decoder": {"300": {"content": "<|im_end|>", "special": True},
                                         "301": {"content": "<tool>", "special": False}},
            },
            "added_tokens.json": {"<|im_end|>": 300, "<tool>": 301},
        }  # fmt: skip
        self.json = _byte_level()
        self.right = {with_json: self._try(with_json) for with_json in ((False, True) if self.json else (False,))}
        self.with_json = False

    def _write(self, name: str, content: bytes) -> None:
        (self.directory / name).write_bytes(content)

    def _try(self, with_json: bool) -> Any:
        self._undamaged(with_json)
        return self.load()

    def _undamaged(self, with_json: bool) -> None:
        self._write("tokenizer.model", self.model)
        for name, content in {**self.files, "tokenizer.json": self.json or {}}.items():
            self._write(name, json.dumps(content).encode())
        if with_json:
            (self.directory / "tokenizer.model").unlink()
            (self.directory / "added_tokens.json").unlink()
            (self.directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')

    def damage(self, rng: random.Random) -> None:
        self.with_json = bool(self.json) and rng.random() < 0.4
        self._undamaged(self.with_json)
        kind = rng.random()
        if self.with_json:
            self._write("tokenizer.json", mutate_json(rng, self.json))
        elif kind < 0.6:
            self._write("tokenizer.model", mutate_bytes(rng, self.model))
        elif kind < 0.75:
            self._write("tokenizer_config.json", b"{}")
            self._write("added_tokens.json", mutate_json(rng, self.files["added_tokens.json"]))
        else:
            self._write("tokenizer_config.json", mutate_json(rng, self.files["tokenizer_config.json"]))

    def load(self) -> tuple[int, list[Any]]:
        from engine.errors import RequestError

        tokenizer = load_tokenizer(self.directory)
        results: list[Any] = []
        for text in TEXTS:
            try:
                ids = tokenizer.encode(text)
            except RequestError:  # a vocabulary that cannot spell it, as is said
                results.append(None)
                continue
            again = tokenizer.encode(text) == ids
            results.append((ids, again, tokenizer.decode(ids), tokenizer.decode([*ids, 300, 301, 7, 1, 2])))
        return tokenizer.vocab_size, results

    def judge(self, loaded: tuple[int, list[Any]]) -> str:
        if loaded == self.right[self.with_json]:
            return "equal"
        vocab_size, results = loaded
        for result in results:
            if result is not None and not (result[1] and all(0 <= i < vocab_size for i in result[0])):
                return "silent"
        return "different"


def _sentencepiece() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the stove was warm and the cat sat near the stove"] * 3), model_writer=model,
        model_type="bpe", vocab_size=285, character_coverage=1.0, byte_fallback=True, hard_vocab_limit=False,
        num_threads=1, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def _byte_level() -> dict[str, Any] | None:
    """A small tokenizer.json; None without the extra `hf`."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    except ImportError:
        return None
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, "th", "the", "<s>", "</s>"]
    model = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[("t", "h"), ("th", "e")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<s>", "</s>"])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
    described: dict[str, Any] = json.loads(model.to_str())
    return described


class _Gguf:
    def __init__(self, directory: Path) -> None:
        self.file = directory / "model.gguf"
        self.whole, self.start = _gguf()
        self.file.write_bytes(self.whole)
        self.right = self.load()

    def damage(self, rng: random.Random) -> None:
        self.file.write_bytes(mutate_bytes(rng, self.whole, 0, self.start))

    def load(self) -> tuple[Any, dict[str, Any]]:
        gguf = GGUF(self.file)
        values = {name: (tensor, gguf.read(name)) for name, tensor in list(gguf.tensors.items())[:16]}
        return gguf.metadata, values

    def judge(self, loaded: tuple[Any, dict[str, Any]]) -> str:
        metadata, values = loaded
        data = self.file.read_bytes()
        same = repr(metadata) == repr(self.right[0]) and values.keys() == self.right[1].keys()
        for name, (tensor, read) in values.items():
            kept, right = self.right[1].get(name, (None, None))
            equal = right is not None and read.shape == right.shape and read.tobytes() == right.tobytes()
            bytes_of = slice(tensor.offset, tensor.offset + tensor.nbytes)
            if tensor == kept and data[bytes_of] == self.whole[bytes_of] and not equal:
                return "silent"
            same &= equal
        return "equal" if same else "different"


def _gguf() -> tuple[bytes, int]:
    """A file with every kind of metadata and four types of tensors; and where its data begin."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    keys = [
        string("general.architecture") + struct.pack("<I", 8) + string("llama"),
        string("general.alignment") + struct.pack("<II", 4, 32),
        string("llama.block_count") + struct.pack("<II", 4, 2),
        string("llama.rope.freq_base") + struct.pack("<If", 6, 1e4),
        string("tokenizer.ggml.add_bos_token") + struct.pack("<IB", 7, 1),
        string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + string("a") + string("bc") + string("<s>"),
        string("tokenizer.ggml.scores") + struct.pack("<IIQ3f", 9, 6, 3, 0.0, -1.0, -2.0),
        string("big") + struct.pack("<IQ", 10, 1 << 40),
    ]
    rng = random.Random(3)
    tensors, blobs, offset = [], [], 0
    for name, kind, dims, size in (
        ("a.weight", 0, (8, 3), 96), ("b.weight", 1, (32, 2), 128), ("c.weight", 2, (32, 2), 36), ("d", 8, (64,), 68),
    ):  # fmt: skip
        tensors.append(string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
        blob = bytes(rng.randrange(60) for _ in range(size))
        blobs.append(blob + bytes(-size % 32))
        offset += len(blobs[-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    head += bytes(-len(head) % 32)
    return head + b"".join(blobs), len(head)
