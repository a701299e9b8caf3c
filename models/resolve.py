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
        return _expanded(own)
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "isotherm"


def _expanded(path: str) -> Path:
    """The path with a leading ~ replaced; that of a user who does not exist stays, and is not found."""
    return Path(os.path.expanduser(path))


def _huggingface_hub() -> Path:
    if hub := os.environ.get("HF_HUB_CACHE"):
        return _expanded(hub)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _roots() -> list[Path]:
    """The directories whose entries are models."""
    roots = [cache_directory() / "models"]
    if own := os.environ.get("ISOTHERM_MODELS"):
        roots.insert(0, _expanded(own))
    return roots


def places() -> list[Path]:
    """Where `found` looks."""
    return [*_roots(), _huggingface_hub()]


def found() -> list[tuple[str, Path]]:
    """Every model that `resolve` finds by name: (name, directory), in the order in which it looks."""
    models: dict[str, Path] = {}
    for root in _roots():
        for child in _children(root):
            if os.path.isfile(child / "config.json"):
                models.setdefault(child.name, child)
    for repository in _children(_huggingface_hub()):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = _snapshot(repository)
        if name != repository.name and os.path.isfile(snapshot / "config.json"):
            models.setdefault(name, snapshot)
    return list(models.items())


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def resolve(name: str) -> Path:
    """The directory of a model given by path, by name in $ISOTHERM_MODELS or our cache, by alias, or by repository name
    in the Hugging Face cache; the first that exists.

    Raises ModelFormatError that lists where it looked, names near it, and how to get the model.
    """
    looked = []
    roots = _roots()
    path = _expanded(name)
    for candidate in dict.fromkeys([path, *(root / name for root in roots)]):
        if os.path.isfile(candidate / "config.json"):
            return candidate
        looked.append(f"{candidate} ({_why_not(candidate)})")
    repository = ALIASES.get(name, name)
    if _is_repository(repository):
        snapshot = _snapshot(_huggingface_hub() / f"models--{repository.replace('/', '--')}")
        if os.path.isfile(snapshot / "config.json"):
            return snapshot
        looked.append(f"{snapshot} ({_why_not(snapshot)})")
    lines = [f"model {name!r} was not found. Looked at:", *(f"  {place}" for place in looked)]
    known = set(ALIASES) | {child.name for root in roots if root.is_dir() for child in root.iterdir() if child.is_dir()}
    if near := difflib.get_close_matches(name, sorted(known - {name}), cutoff=0.5):
        lines.append(f"Names near it: {', '.join(near)}")
    raise ModelFormatError("\n".join([*lines, _advice(name, repository)]))


def _why_not(candidate: Path) -> str:
    if os.path.isfile(candidate):
        if candidate.suffix == ".gguf":
            return f"a GGUF file; convert it: python -m tools.convert {candidate} OUTDIR"
        return "a file; give the directory that holds config.json"
    if os.path.isfile(candidate / "params.json"):
        return f"Meta's own format; convert it: python -m tools.convert {candidate} OUTDIR"
    return "no config.json in it" if os.path.isdir(candidate) else "does not exist"


def _is_repository(name: str) -> bool:
    """Whether it reads as organisation/model, and not as a path."""
    return name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not name.endswith("/")


def _snapshot(repository: Path) -> Path:
    """The snapshot that refs/main names: models--org--name/snapshots/<revision>."""
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return repository
    return repository / "snapshots" / os.path.basename(revision)


def _advice(name: str, repository: str) -> str:
    if name == "smollm2-135m":
        return "Get it: python -m tools.get_demo_model"
    if not _is_repository(repository):
        return "Give a directory with config.json and safetensors files; a demo model: python -m tools.get_demo_model"
    gated = " (Llama 2 is gated: accept its licence on its page and log in first)" if "Llama-2" in repository else ""
    return f"Get it: hf download {repository} --exclude '*.bin'{gated}"
