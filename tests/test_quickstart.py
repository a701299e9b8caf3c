"""The set-up script: what it would run, on which machine. Nothing is installed here."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import quickstart

SOURCE = Path(quickstart.__file__)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A Linux machine without a GPU and a fresh clone; commands are recorded, and those with a word of `fails` fail."""
    state = SimpleNamespace(commands=[], fails=set(), versions={}, venv="", gpu=False, code=0)

    def record(command):
        assert all(type(word) is str for word in command)
        state.commands.append(" ".join(command).replace(quickstart.PYTHON, "python").replace(sys.executable, "python3"))
        return 0 if state.fails.isdisjoint(command) else state.code or 1

    exists = os.path.exists
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(quickstart, "ROOT", str(tmp_path))
    monkeypatch.setattr(quickstart, "STAMP", str(tmp_path / ".venv" / "quickstart.json"))
    monkeypatch.setattr(quickstart, "call", record)
    monkeypatch.setattr(quickstart, "try_run", lambda command: record(command) == 0)
    monkeypatch.setattr(quickstart, "venv_output", lambda program: state.venv)
    monkeypatch.setattr(quickstart, "installed", lambda package: state.versions.get(package, ""))
    monkeypatch.setattr(quickstart.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**11))
    monkeypatch.setattr(os.path, "exists", lambda path: state.gpu if path == "/dev/nvidia0" else exists(path))
    monkeypatch.setattr(os, "chdir", lambda path: None)
    monkeypatch.setattr(sys, "platform", "linux")
    return state


def torch_commands(state):
    return [command.partition("--disable-pip-version-check ")[2] for command in state.commands if "torch" in command]


def test_the_script_parses_on_python_3_6_and_imports_only_the_standard_library():
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"), feature_version=(3, 6))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= set(sys.stdlib_module_names) - {"__future__"}
    # What 3.6 can not evaluate must be quoted: X | Y and list[X].
    annotations = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg) and node.annotation]
    annotations += [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert all(isinstance(node, ast.Name | ast.Constant) for node in annotations)


def test_an_old_python_is_named_with_its_fix(machine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    for here, fix in (("python3.12", "python3.12 tools/quickstart.py"), ("none", "sudo apt install python3")):
        monkeypatch.setattr(quickstart, "works", lambda command, here=here: command[0] == here)
        assert quickstart.main([]) == 1
        assert fix in capsys.readouterr().err
    assert machine.commands == []


def test_a_python_without_venv_is_named_with_its_fix(machine, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "works", lambda command: "ensurepip" not in command[-1])
    monkeypatch.setattr(quickstart.shutil, "which", lambda name: "/usr/bin/apt")
    assert quickstart.main([]) == 1
    assert "no module ensurepip: sudo apt install python3-venv" in capsys.readouterr().err
    assert machine.commands == []


def test_a_fresh_clone_is_set_up_and_the_second_run_installs_nothing(machine, capsys):
    assert quickstart.main([]) == 0
    # "python" where the tests run in the very environment that this would make
    assert machine.commands[0].split(" ", 1)[1] == f"-m venv --clear {quickstart.VENV}"
    assert torch_commands(machine) == ["torch==2.13.0+cpu"]
    assert machine.commands[2].endswith("-e .[hf]")
    assert machine.commands[3] == "python -m tools.get_demo_model"
    assert machine.commands[4].startswith(
        f"python -m engine.generate --model smollm2-135m --prompt {quickstart.PROMPT}"
    )
    assert machine.commands[4].endswith("--max-tokens 48 --temperature 0")
    assert "200 MB to download" in capsys.readouterr().out
    machine.venv, machine.versions = "3.11", {"torch": "2.13.0+cpu", "isotherm": "0.1.0"}
    machine.commands.clear()
    assert quickstart.main([]) == 0
    assert [command.split()[2] for command in machine.commands] == ["tools.get_demo_model", "engine.generate"]
    machine.commands.clear()
    assert quickstart.main(["test"]) == 0  # the test tools are not there yet
    assert machine.commands[0].endswith("-e .[dev]")
    machine.commands.clear()
    Path(quickstart.ROOT, "pyproject.toml").write_text("[project] # changed\n")
    assert quickstart.main([]) == 0
    assert machine.commands[0].endswith("-e .[hf]")


@pytest.mark.parametrize(("gpu", "fails", "wanted"), [
    (True, [], ["torch>=2.6"]),
    (False, [], ["torch==2.13.0+cpu"]),
    (False, ["torch==2.13.0+cpu"], ["torch==2.13.0+cpu", f"--index-url {quickstart.CPU_INDEX} torch==2.13.0+cpu",
                                   "torch>=2.6"]),
])  # fmt: skip
def test_torch_is_the_cpu_build_where_there_is_no_gpu_and_a_registry_has_it(machine, gpu, fails, wanted, capsys):
    machine.gpu, machine.fails = gpu, set(fails)
    quickstart.install_torch()
    assert [command.removeprefix("install ") for command in torch_commands(machine)] == wanted
    assert ("3 GB" in capsys.readouterr().out) == ("torch>=2.6" in wanted)


def test_torch_that_is_there_is_kept_unless_too_old(machine):
    machine.versions["torch"] = "2.6.0"
    quickstart.install_torch()
    assert machine.commands == []
    machine.versions["torch"] = "2.5.1+cu124"
    quickstart.install_torch()
    assert torch_commands(machine) == ["torch==2.13.0+cpu"]


def test_macos_takes_plain_torch(machine, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(quickstart.platform, "machine", lambda: "arm64")
    quickstart.install_torch()
    assert torch_commands(machine) == ["torch>=2.6"]
    monkeypatch.setattr(quickstart.platform, "machine", lambda: "x86_64")
    with pytest.raises(quickstart.SetupError, match="Intel"):
        quickstart.install_torch()


def test_the_exit_code_is_that_of_the_tests_and_both_halves_run(machine):
    for fails, code in (({"tests/kernels"}, 5), ({"--ignore=tests/kernels"}, 2), (set(), 0)):
        machine.commands.clear()
        machine.fails, machine.code = fails, code
        assert quickstart.main(["test"]) == code
        pytest = "python -m pytest -n auto --maxprocesses 4 --dist loadfile tests"
        pytests = [f"{pytest} --ignore=tests/kernels", f"{pytest}/kernels"]
        assert machine.commands[-2:] == pytests


def test_a_full_disk_and_a_failing_command_end_in_one_message(machine, monkeypatch, capsys):
    machine.fails = {"engine.generate"}
    assert quickstart.main([]) == 1
    assert "generating text failed: the last command ended with exit code 1" in capsys.readouterr().err
    monkeypatch.setattr(quickstart.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**7))
    assert quickstart.main([]) == 1
    assert "GB of free disk are needed" in capsys.readouterr().err


def test_help_comes_at_once_from_any_folder(tmp_path):
    done = subprocess.run([sys.executable, SOURCE, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "run the tests instead" in done.stdout
