"""Set-up in one command, from a fresh clone: `python3 tools/quickstart.py` (or `... quickstart.py test`).

    (nothing)   .venv in the repository, PyTorch, this project, the demo model; then real text is generated
    test        .venv, PyTorch, this project with its test tools; then the tests are run, whose exit code this is

Standard library only, and no syntax newer than Python 3.6: a Python that is too old must get as far as saying so (hence
the quoted annotations). Safe to run again: what is there already is used, and the second run takes seconds.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from typing import TextIO

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "Scripts", "python.exe") if os.name == "nt" else os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "quickstart.json")  # what was installed last, so that a second run can skip pip
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 6)
CPU_TORCH = "torch==2.13.0+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROMPT = "Photosynthesis is the process by which"

# (to download, on disk), rounded up: measured on Linux x86-64 with torch 2.13 and triton 3.9.
SIZES = {"cpu": ("200 MB", 1.0), "cuda": ("3 GB", 6.0), "mac": ("100 MB", 0.6)}
PROJECT_SIZES = {"hf": ("330 MB", 1.3), "dev": ("360 MB", 1.4)}


class SetupError(Exception):
    """Set-up can not go on; the message says what to do."""


def main(argv: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 tools/quickstart.py",
        description="Set up Isotherm in .venv and generate text with a demo model, or run its tests.",
    )
    parser.add_argument("what", nargs="?", choices=["test"], help="run the tests instead of the demo")
    args = parser.parse_args(argv)
    try:
        check_python()
        os.chdir(ROOT)
        make_venv()
        install_torch()
        install_project("dev" if args.what == "test" else "hf")
        if args.what == "test":
            return test()
        demo()
    except SetupError as error:
        say(f"\nerror: {error}", sys.stderr)
        return 1
    except OSError as error:
        say(f"\nerror: {error.filename or 'set-up'}: {error.strerror or error}", sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("\ninterrupted: run the same command again to go on", sys.stderr)
        return 130
    return 0


def check_python() -> None:
    """The interpreter this runs in will be that of .venv."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        newer = [f"python3.{minor}" for minor in range(14, 9, -1) if works([f"python3.{minor}", "-c", "pass"])]
        if newer:
            fix = f"run it with a newer one that is here: {newer[0]} tools/quickstart.py"
        else:
            fix = (
                "install one (Debian 12, Ubuntu 22.04 and newer: sudo apt install python3 python3-venv; macOS: "
                "brew install python; else https://www.python.org/downloads), then run this with it"
            )
        wanted, got = ".".join(map(str, OLDEST_PYTHON)), platform.python_version()
        raise SetupError(f"Isotherm needs Python {wanted} or newer, and {sys.executable} is {got}; {fix}")
    if sys.maxsize < 2**32:
        raise SetupError(f"PyTorch needs a 64-bit Python, and {sys.executable} is a 32-bit one")


def make_venv() -> None:
    """Create .venv, or use the one that is there; if its Python does not run, it is made anew."""
    version = venv_output("import sys; print('%d.%d' % sys.version_info[:2])")
    if version and numbers(version) < OLDEST_PYTHON:
        raise SetupError(f"{VENV} has Python {version}: remove that folder and run this again")
    if version and venv_output("import pip; print('here')"):
        return
    missing = [name for name in ("venv", "ensurepip") if not works([sys.executable, "-c", f"import {name}"])]
    if missing:
        on_debian = shutil.which("apt") or shutil.which("apt-get")
        fix = "sudo apt install python3-venv" if on_debian else "install your system's package for it"
        raise SetupError(f"{sys.executable} has no module {' and no '.join(missing)}: {fix}, then run this again")
    if version:  # made without pip, or interrupted before it came
        run([PYTHON, "-m", "ensurepip"], "adding pip to .venv failed")
        return
    require_space(0.1, ROOT)
    run([sys.executable, "-m", "venv", "--clear", VENV], "creating .venv failed")


def install_torch() -> None:
    """PyTorch, unless a version that will do is there. On Linux without an NVIDIA GPU its CPU build, if offered."""
    found = installed("torch")
    if found and numbers(found) >= OLDEST_TORCH:
        say(f"PyTorch {found} is there")
        return
    plain = "torch>=" + ".".join(map(str, OLDEST_TORCH))
    if sys.platform == "darwin":
        if platform.machine() == "x86_64":
            raise SetupError(f"{plain} has no build for Intel Macs, nor for a Python under Rosetta")
        announce("PyTorch", SIZES["mac"])
        run(pip("install", plain), "installing PyTorch failed")
        return
    if sys.platform.startswith("linux") and not os.path.exists("/dev/nvidia0"):
        announce("PyTorch's CPU build (there is no NVIDIA GPU)", SIZES["cpu"])
        for index in ([], ["--index-url", CPU_INDEX]):
            if try_run(pip("install", *index, CPU_TORCH)):
                return
        say("No registry here offers the CPU build: the default one follows, made for NVIDIA GPUs")
    announce("PyTorch with CUDA", SIZES["cuda"])
    run(pip("install", plain), "installing PyTorch failed")


def install_project(extra: str) -> None:
    """`pip install -e .[extra]`, unless that was done for this pyproject.toml and Python already."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        state = [ROOT, sys.version, hashlib.sha256(file.read()).hexdigest()]
    stamp = read_stamp()
    if installed("isotherm") and (stamp.get(extra) == state or stamp.get("dev") == state):
        say("Isotherm is installed")
        return
    announce("Isotherm and what it needs", PROJECT_SIZES[extra])
    run(pip("install", "-e", f".[{extra}]"), "installing Isotherm failed")
    stamp[extra] = state
    with open(STAMP, "w") as file:
        json.dump(stamp, file)


def demo() -> None:
    run([PYTHON, "-m", "tools.get_demo_model"], "fetching the demo model failed")
    generate = ["-m", "engine.generate", "--model", "smollm2-135m", "--prompt", PROMPT]
    run([PYTHON, *generate, "--max-tokens", "48", "--temperature", "0"], "generating text failed")
    say("\nThat is it. Next: source .venv/bin/activate, then python -m engine.chat --model smollm2-135m")


def test() -> int:
    """Both halves of the suite, in a few processes. An out-of-bounds store in an interpreted kernel would end a whole
    process, so the kernels are tested in some of their own. Returns the first exit code that is not 0."""
    pytest = [PYTHON, "-m", "pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
    codes = [call([*pytest, "tests", "--ignore=tests/kernels"]), call([*pytest, "tests/kernels"])]
    return next((code for code in codes if code), 0)


def pip(*arguments: str) -> "list[str]":
    return [PYTHON, "-m", "pip", arguments[0], "--disable-pip-version-check", *arguments[1:]]


def run(command: "list[str]", failure: str) -> None:
    code = call(command)
    if code:
        raise SetupError(f"{failure}: the last command ended with exit code {code}, its message is above")


def call(command: "list[str]") -> int:
    """Run a command in the repository, after showing it; returns its exit code."""
    show(command)
    return subprocess.call(command, cwd=ROOT, env=environment())


def try_run(command: "list[str]") -> bool:
    """As `run`, for a command that may fail: says whether it went well, and why pip failed if not."""
    show(command)
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, universal_newlines=True)
    complaints = [line for line in process.communicate()[1].splitlines() if line.startswith("ERROR")]
    if process.returncode and complaints:
        say(f"  not there: {complaints[0][:200]}")
    return process.returncode == 0


def environment() -> "dict[str, str]":
    # A pip.conf that installs for the user would refuse to work in a virtual environment.
    return dict(os.environ, PIP_USER="0")


def venv_output(program: str) -> str:
    """What a short program prints in .venv's Python; "" if there is no such Python or the program fails."""
    try:
        process = subprocess.Popen([PYTHON, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return ""
    output = process.communicate()[0].decode("utf-8", "replace").strip()
    return output if process.returncode == 0 else ""


def installed(package: str) -> str:
    """The version of a package in .venv, or "". Does not import it: importing torch takes seconds."""
    return venv_output(f"from importlib.metadata import version; print(version({package!r}))")


def numbers(version: str) -> "tuple[int, ...]":
    """ "2.13.0+cpu" -> (2, 13)."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(digit for digit in part if digit.isdigit()) or 0) for part in parts)


def works(command: "list[str]") -> bool:
    try:
        return subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def read_stamp() -> "dict[str, object]":
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def announce(what: str, size: "tuple[str, float]") -> None:
    """Say how much is about to be downloaded, and refuse if the disk will not hold it."""
    download, gigabytes = size
    say(f"\nInstalling {what}: about {download} to download, {gigabytes:.1f} GB on disk, less what is there already")
    require_space(gigabytes, ROOT)


def require_space(gigabytes: float, path: str) -> None:
    free = shutil.disk_usage(path).free / 1e9
    if free < gigabytes:
        raise SetupError(f"{gigabytes:.1f} GB of free disk are needed in {path}, {free:.1f} GB are there")


def show(command: "list[str]") -> None:
    words = [os.path.relpath(word, ROOT) if word in (PYTHON, VENV) else word for word in command]
    say("\n$ " + " ".join(shlex.quote(word) for word in words))


def say(text: str, file: "TextIO | None" = None) -> None:
    # Flushed, so that it stands before what the next command prints.
    print(text, file=file or sys.stdout, flush=True)


if __name__ == "__main__":
    sys.exit(main())
