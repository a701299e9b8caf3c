"""The shape of the code: who may import whom, what must stay unimported, how long a file may be, what is never called.

tools, tests -> engine -> models, memory -> kernels
"""

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from oracle.checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "models", "memory", "kernels")
ALLOWED = {  # package -> packages of ours that it may import
    "tools": {"tools", "engine", "models", "memory", "kernels"},
    "engine": {"engine", "models", "memory", "kernels"},
    "models": {"models", "kernels"},
    "memory": {"memory", "kernels"},
    "kernels": {"kernels"},
}
OURS = {*ALLOWED, "tests"}
TRITON_FILES = {f"kernels/{name}.py" for name in (
    "fused", "attention", "prefill", "codes", "compress", "tokens", "recall", "score", "linear",
)}  # fmt: skip
NO_TORCH = {
    "memory/__init__.py", "memory/config.py", "memory/buddy.py", "memory/errors.py", "models/__init__.py",
    "models/errors.py", "models/resolve.py", "models/llama/config.py", "models/files.py", "models/checkpoint.py",
    "tools/completion.py", "engine/doctor.py", "tools/doctor.py", "engine/__init__.py", "memory/flash.py",
    "engine/config.py", "engine/errors.py", "engine/cli.py", "tools/cache.py", "tools/facts.py",
}  # fmt: skip


def sources(*packages):
    files = [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]
    return [pytest.param(file, id=str(file.relative_to(ROOT))) for file in files]


def tree_of(file):
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(tree, top_level_only=False):
    """The absolute names of all modules (and what is taken from them) that are imported: at any depth of the file, or
    those that importing it imports."""
    nodes = ast.walk(tree)
    if top_level_only:
        nodes = (
            node for statement in tree.body if not _is_type_checking(statement) for node in walk_outside(statement)
        )
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _is_type_checking(statement):
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"


def walk_outside(node):
    """Like ast.walk, but not into functions."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from walk_outside(child)


def tops(names):
    return {name.split(".")[0] for name in names}


def test_the_sources_are_found():
    names = {param.id for param in sources(*ALLOWED)}
    assert {"engine/llm.py", "models/llama/model.py", "memory/buddy.py", "kernels/reference.py"} <= names
    assert names >= NO_TORCH
    assert imports(ast.parse("import a.b\ndef f():\n    from c import d"), top_level_only=True) == ["a.b"]
    assert imports(ast.parse("if TYPE_CHECKING:\n    import a\nimport b"), top_level_only=True) == ["b"]
    assert imports(ast.parse("import a.b\ndef f():\n    from c import d")) == ["a.b", "c", "c.d"]


@pytest.mark.parametrize("file", sources(*ALLOWED))
def test_imports_go_one_way(file):
    package = file.relative_to(ROOT).parts[0]
    assert tops(imports(tree_of(file))) & OURS <= ALLOWED[package]


@pytest.mark.parametrize("file", sources(*ALLOWED))
def test_only_the_kernels_import_triton(file):
    name = str(file.relative_to(ROOT))
    if name in TRITON_FILES or name.startswith("tools/"):
        return
    found = imports(tree_of(file))
    assert "triton" not in tops(found)
    assert not {name.removesuffix(".py").replace("/", ".") for name in TRITON_FILES} & set(found)


@pytest.mark.parametrize("name", sorted(NO_TORCH))
def test_light_modules_import_no_torch(name):
    found = tops(imports(tree_of(ROOT / name), top_level_only=True))
    assert not found & {"torch", "numpy", "triton", "safetensors", "sentencepiece", "tokenizers", "tqdm"}


@pytest.mark.parametrize("name", ["memory/config.py", "memory/buddy.py", "memory/errors.py"])
def test_the_allocator_knows_no_torch_even_inside_functions(name):
    assert not tops(imports(tree_of(ROOT / name))) & {"torch", "numpy"}


def test_the_policy_knows_numbers_only():
    assert not tops(imports(tree_of(ROOT / "memory/policy.py"))) & {"torch", "kernels", "engine"}


@pytest.mark.parametrize("file", sources(*PACKAGES))
def test_files_stay_readable(file):
    assert len(file.read_text().splitlines()) <= 400


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "runpy"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def unsafe(tree):
    """What in the tree could run a stranger's code."""
    found = sorted(tops(imports(tree)) & FORBIDDEN_MODULES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS or called in ("torch.load", "torch.hub.load"):
                found.append(called)
            if any(keyword.arg in ("shell", "allow_pickle", "trust_remote_code") for keyword in node.keywords):
                found.append(f"{called}(shell / allow_pickle / trust_remote_code)")
        elif isinstance(node, ast.ImportFrom) and node.module == "torch" and any(a.name == "load" for a in node.names):
            found.append("from torch import load")
    return found


# They read pickles, with weights_only; see the tests of tools/convert.
CONVERTERS = {f"tools/{file.name}" for file in (ROOT / "tools").glob("convert*.py")}


@pytest.mark.parametrize("file", sources(*ALLOWED))
def test_nothing_runs_what_a_stranger_wrote(file):
    assert str(file.relative_to(ROOT)) in CONVERTERS or not unsafe(tree_of(file))


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from pickle import loads", "x = eval('1')", "torch.load(f)", "from torch import load",
     "def f():\n    exec(x)", "np.load(f, allow_pickle=True)", "run(x, shell=True)"],
)  # fmt: skip
def test_the_check_for_unsafe_calls_sees_them(text):
    assert unsafe(ast.parse(text))
    assert not unsafe(ast.parse("module.eval()\nre.compile('x')\njson.load(f)\nself.load(x)"))


def table(name, key):
    """A list of strings of pyproject.toml (tomllib came with Python 3.11)."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    start = lines.index(f"[{name}]")
    (line,) = [line for line in lines[start + 1 :] if line.startswith(f"{key} = ")][:1]
    return ast.literal_eval(line.split(" = ", 1)[1])


def test_every_package_is_listed():
    directories = {str(file.parent.relative_to(ROOT)) for top in ALLOWED for file in (ROOT / top).rglob("*.py")}
    assert sorted(table("tool.setuptools", "packages")) == sorted(name.replace(os.sep, ".") for name in directories)
    for name in directories:
        assert (ROOT / name / "__init__.py").is_file(), name
    others = {file.parent.name for file in ROOT.glob("*/__init__.py")} - ALLOWED.keys()
    assert not others, "a package at the top that nobody listed"


def test_the_strict_type_check_covers_what_it_should():
    assert {"engine", "models", "kernels", "memory", "tools"} == set(table("tool.mypy", "packages"))


# In a process of its own.


def run_python(code, *args):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("module", ["engine", "models", "memory", "kernels", "engine.cli", "memory.buddy"])
def test_importing_is_light(module):
    code = f"""
        import sys, {module}
        print(*sorted({{name.split(".")[0] for name in sys.modules}} & {{
            "torch", "numpy", "triton", "sentencepiece", "safetensors", "tokenizers", "tqdm"}}))
        """
    assert run_python(code) == []


def test_every_name_that_engine_offers_is_there():
    code = """
        import engine
        print(*sorted(set(engine.__all__) - {name for name in engine.__all__ if getattr(engine, name)}))
        assert "torch" in __import__("sys").modules
        try:
            engine.nothing
        except AttributeError as error:
            assert "nothing" in str(error)
        else:
            raise SystemExit("an attribute that is not there")
        """
    assert run_python(code) == []


def test_llm_on_a_cpu_needs_no_triton(tmp_path):
    """As on macOS: importing triton fails, and nobody tries."""
    make_checkpoint(tmp_path)
    code = """
        import sys

        class NoTriton:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "triton":
                    tried.append(name)
                    raise ModuleNotFoundError(name)

        tried = []
        sys.meta_path.insert(0, NoTriton())
        from engine import LLM, SamplingParams

        llm = LLM(sys.argv[1], device="cpu", threads=1)
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        outputs = llm.generate(["The cat", "The wind"], params, use_tqdm=False)
        llm.score(["The cat sat"])
        print(*(len(output.token_ids) for output in outputs), *tried, *(m for m in sys.modules if m == "kernels.fused"))
        """
    assert run_python(code, tmp_path) == ["4", "4"]
