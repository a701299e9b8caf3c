"""From a model's name to its directory. Looks at files only; never uses the network."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from models.errors import ModelFormatError

# Short names, and where the Hugging Face cache keeps the same model.
ALIASES = {
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-13b-chat": "meta-llama/Llama-2-13b-chat-hf",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
}


def cache_directory() -> Path:
    """Where models fetched by our own tools lie: $ISOTHERM_CACHE, else the XDG cache directory."""
    if own := os.environ.get("ISOTHERM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "isotherm"


def _huggingface_hub() -> Path:
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub).expanduser()
    home = os.environ.get("HF_HOME")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return base.expanduser() / "hub"


def resolve(name: str) -> Path:
    """The directory of a model given by path, by name in $ISOTHERM_MODELS or our cache, by alias, or by repository name
    in the Hugging Face cache; the first that exists.

    Raises ModelFormatError that lists where it looked, names near it, and how to get the model.
    """
    looked = []
    roots = [cache_directory() / "models"]
    if own := os.environ.get("ISOTHERM_MODELS"):
        roots.insert(0, Path(own).expanduser())
    path = Path(name).expanduser()
    for candidate in [path, *(root / name for root in roots)]:
        if (candidate / "config.json").is_file():
            return candidate
        looked.append(f"{candidate} ({_why_not(candidate)})")
    repository = ALIASES.get(name, name)
    if repository.count("/") == 1 and not path.is_absolute():
        snapshot = _snapshot(_huggingface_hub() / f"models--{repository.replace('/', '--')}")
        if (snapshot / "config.json").is_file():
            return snapshot
        looked.append(f"{snapshot} ({_why_not(snapshot)})")
    lines = [f"model {name!r} was not found. Looked at:", *(f"  {place}" for place in looked)]
    known = set(ALIASES) | {child.name for root in roots if root.is_dir() for child in root.iterdir() if child.is_dir()}
    if near := difflib.get_close_matches(name, sorted(known), cutoff=0.5):
        lines.append(f"Names near it: {', '.join(near)}")
    raise ModelFormatError("\n".join([*lines, _advice(name, repository)]))


def _why_not(candidate: Path) -> str:
    if candidate.is_file():
        return "a file; give the directory that holds config.json"
    return "no config.json in it" if candidate.is_dir() else "does not exist"


def _snapshot(repository: Path) -> Path:
    """The snapshot that refs/main names: models--org--name/snapshots/<revision>."""
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return repository
    return repository / "snapshots" / os.path.basename(revision)


def _advice(name: str, repository: str) -> str:
    if name == "smollm2-135m":
        return "Get it: python -m tools.get_demo_model"
    if repository.count("/") != 1:
        return "Give a directory with config.json and safetensors files; a demo model: python -m tools.get_demo_model"
    gated = " (Llama 2 is gated: accept its licence on its page and log in first)" if "Llama-2" in repository else ""
    return f"Get it: huggingface-cli download {repository} --include '*.json' '*.safetensors' 'tokenizer*'{gated}"
