"""From a model's name to its directory. Looks at files only; never uses the network."""

import difflib
import os
from pathlib import Path

from models.errors import ModelFormatError

# Short names, and where the Hugging Face cache keeps the same model.
ALIASES = {f"llama2-{size}": f"meta-llama/Llama-2-{size}-hf" for size in ("7b", "7b-chat", "13b", "13b-chat")}
ALIASES["smollm2-135m"] = "HuggingFaceTB/SmolLM2-135M-Instruct"


def cache_directory() -> Path:
    """Where models fetched by our own tools lie: $ISOTHERM_CACHE, else the XDG cache directory."""
    return _directory("ISOTHERM_CACHE", _directory("XDG_CACHE_HOME", "~/.cache") / "isotherm")


def _directory(variable: str, default: str | Path) -> Path:
    """What the environment says, or the default; a leading ~ is replaced, but for a user who does not exist."""
    return Path(os.path.expanduser(os.environ.get(variable) or default))


def places() -> list[Path]:
    """Where `found` looks: the directories whose entries are models, and last the Hugging Face cache."""
    own = [_directory("ISOTHERM_MODELS", "")] if os.environ.get("ISOTHERM_MODELS") else []
    home = _directory("HF_HOME", _directory("XDG_CACHE_HOME", "~/.cache") / "huggingface")
    return [*own, cache_directory() / "models", _directory("HF_HUB_CACHE", home / "hub")]


def found() -> dict[str, Path]:
    """Every model that `resolve` finds by name, with its directory; in the order in which it looks."""
    *roots, hub = places()
    candidates = [(child.name, child) for root in roots for child in sorted(root.glob("*"))]
    for repository in sorted(hub.glob("models--*")):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        candidates.append((name, _snapshot(repository)))
    models: dict[str, Path] = {}
    for name, path in candidates:
        if os.path.isfile(path / "config.json"):
            models.setdefault(name, path)
    return models


def resolve(name: str) -> Path:
    """The directory of a model given by path, by name in $ISOTHERM_MODELS or our cache, by alias, or by repository name
    in the Hugging Face cache; the first that exists.

    Raises ModelFormatError that lists where it looked, names near it, and how to get the model.
    """
    repository = ALIASES.get(name, name)
    *roots, hub = places()
    candidates = [Path(os.path.expanduser(name)), *(root / name for root in roots)]
    if _is_repository(repository):
        candidates.append(_snapshot(hub / f"models--{repository.replace('/', '--')}"))
    for candidate in candidates:
        if os.path.isfile(candidate / "config.json"):
            return candidate
    looked = [f"  {candidate} ({_why_not(candidate)})" for candidate in dict.fromkeys(candidates)]
    lines = [f"model {name!r} was not found. Looked at:", *looked]
    if near := difflib.get_close_matches(name, sorted((ALIASES.keys() | found().keys()) - {name}), cutoff=0.5):
        lines.append(f"Names near it: {', '.join(near)}")
    if _is_repository(repository) and name != "smollm2-135m":
        gated = "(Llama 2 is gated: accept its licence on its page and log in first)" if "Llama-2" in repository else ""
        lines.append(f"Get it: hf download {repository} --exclude '*.bin' {gated}")
    else:
        demo = "smollm2-135m, a demo model: python -m tools.get_demo_model"
        lines.append(f"Give a directory with config.json and safetensors files, or get {demo}")
    raise ModelFormatError("\n".join(lines))


def _why_not(candidate: Path) -> str:
    way = f"convert it: python -m tools.convert {candidate} OUTDIR"
    if os.path.isfile(candidate):
        gguf = candidate.suffix == ".gguf"
        return f"a GGUF file; {way}" if gguf else "a file; give the directory that holds config.json"
    if os.path.isfile(candidate / "params.json"):
        return f"Meta's own format; {way}"
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
