"""Prefixes that outlive the process: the engine over a flash cache, across restarts and on files that are damaged."""

import gc
import json
import os
import shutil
import subprocess
import sys

import pytest
from oracle.checkpoint import make_checkpoint
from test_tiers_engine import greedily, live, prompt, run

from engine import LLM, ConfigError
from kernels import reference

PAGE = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def plain(directory):
    return load(directory, enable_prefix_caching=False)


def load(path, flash=None, **settings):
    if flash is not None:
        settings = {"flash_cache_dir": flash, "flash_cache_persist": True, **settings}
    return LLM(path, **{"threads": 1, "dtype": "float32", "page_size": PAGE, **settings})


def answer(llm, tokens, **params):
    output = llm.generate([tokens], greedily(12, **params))[0]
    return output.token_ids, output.num_cached_tokens


def ended(llm):
    """As at the end of the process."""
    llm._cache.flash.close()


def files(flash):
    return sorted(file for file in flash.iterdir() if file.name != "isotherm.lock")


def test_a_known_prefix_is_a_hit_after_a_restart(directory, plain, tmp_path):
    tokens = prompt(150)
    wanted, _ = answer(plain, tokens)
    first = load(directory, tmp_path / "flash")
    assert answer(first, tokens) == (wanted, 0)
    ended(first)
    second = load(directory, tmp_path / "flash")
    assert answer(second, tokens) == (wanted, 144)  # whole pages
    stats = second.stats()["flash"]
    assert stats["hits"] == 9 and stats["read_bytes"] == 9 * second._cache.config.page_bytes
    assert answer(second, tokens) == (wanted, 149)  # by now in memory, to the token
    assert second.stats()["flash"]["hits"] == 9
    other = prompt(100) + prompt(50, 1)
    assert answer(second, other) == (answer(plain, other)[0], 100)
    second._cache.check([])
    ended(second)


def test_answers_are_kept_too(directory, plain, tmp_path):
    tokens = prompt(60)
    first = load(directory, tmp_path / "flash")
    said = first.generate([tokens], greedily(60))[0].token_ids
    ended(first)
    second = load(directory, tmp_path / "flash")
    longer = [*tokens, *said, *prompt(20, 3)]
    assert answer(second, longer) == (answer(plain, longer)[0], 112)
    ended(second)


@pytest.mark.parametrize(
    "changes", [{"page_size": 32}, {"dtype": "bfloat16"}, {"rope_scaling": {"type": "linear", "factor": 2}}]
)
def test_what_was_computed_otherwise_is_not_found(directory, tmp_path, changes):
    first = load(directory, tmp_path / "flash")
    answer(first, prompt(150))
    ended(first)
    second = load(directory, tmp_path / "flash", **changes)
    assert answer(second, prompt(150))[1] == 0
    ended(second)
    third = load(directory, tmp_path / "flash")
    assert answer(third, prompt(150))[1] == 144
    ended(third)


def test_other_weights_find_nothing(directory, tmp_path):
    first = load(directory, tmp_path / "flash")
    answer(first, prompt(150))
    ended(first)
    make_checkpoint(tmp_path / "other", seed=5)
    for file in directory.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path / "other" / file.name)
    second = load(tmp_path / "other", tmp_path / "flash")
    assert answer(second, prompt(150))[1] == 0
    ended(second)


def test_a_tenant_finds_only_its_own(directory, tmp_path):
    first = load(directory, tmp_path / "flash")
    answer(first, prompt(150), cache_salt="a")
    ended(first)
    second = load(directory, tmp_path / "flash")
    assert answer(second, prompt(150))[1] == 0
    assert answer(second, prompt(150), cache_salt="b")[1] == 0
    assert answer(second, prompt(150), cache_salt="a")[1] == 144
    ended(second)


@pytest.mark.parametrize("changes", [{"kv_budget": 0.2, "recall": 1.0}, {"kv_cache_memory": 1 << 15, "recall": 1.0}])
def test_a_prefix_larger_than_the_memory(directory, plain, tmp_path, changes):
    """Pages go down as they come from flash; with everything recalled the answer is exact."""
    tokens = prompt(400, 4)
    first = load(directory, tmp_path / "flash", max_num_batched_tokens=64, **changes)
    wanted, _ = answer(plain, tokens)
    assert answer(first, tokens) == (wanted, 0)
    ended(first)
    second = load(directory, tmp_path / "flash", max_num_batched_tokens=64, **changes)
    assert answer(second, tokens) == (wanted, 384)
    assert second.stats()["kv_moves"] > 0
    second._cache.check([])
    ended(second)


def test_what_was_computed_over_compressed_pages_is_marked(directory, plain, tmp_path):
    tokens = prompt(300, 2)
    first = load(directory, tmp_path / "flash", max_num_batched_tokens=64, kv_budget=0.2)
    answer(first, tokens)
    ended(first)
    second = load(directory, tmp_path / "flash")
    wanted, cached = answer(second, tokens, exact_prefix=True)
    assert wanted == answer(plain, tokens)[0] and 0 < cached < 288
    ended(second)  # which put exact pages in the place of the others
    third = load(directory, tmp_path / "flash")
    assert answer(third, tokens) == (wanted, 288)
    ended(third)


@pytest.mark.parametrize("changes", [{}, {"recall": 0.05}])
def test_what_goes_down_while_it_is_written_is_stored_to_the_end(directory, tmp_path, changes, monkeypatch):
    """Page by page as chunks come, though the first ones can soon be read no more; and each is read once."""
    llm = load(directory, tmp_path / "flash", max_num_batched_tokens=64, kv_budget=0.2, **changes)
    read, reads = type(llm._cache._frames).read, []
    monkeypatch.setattr(type(llm._cache._frames), "read", lambda self, page: reads.append(page) or read(self, page))
    answer(llm, prompt(480, 2))
    llm._cache.flash.flush()
    assert llm.stats()["flash"]["records"] == (480 + 12 - 1) // PAGE and len(reads) < 2 * 30
    ended(llm)


def test_lossy_pages_serve_engines_with_a_budget_alone(directory, plain, tmp_path):
    tokens, budget = prompt(300, 2), {"max_num_batched_tokens": 64, "kv_budget": 0.2}
    first = load(directory, tmp_path / "flash", **budget)
    answer(first, tokens)
    ended(first)
    again = load(directory, tmp_path / "flash", **budget)
    _, most = answer(again, tokens)
    ended(again)
    exact = load(directory, tmp_path / "flash")
    wanted, cached = answer(exact, tokens)
    assert wanted == answer(plain, tokens)[0] and 0 < cached < most
    ended(exact)


def test_requests_together_find_what_is_stored(directory, plain, tmp_path):
    shared, ids = prompt(96), {}
    first = load(directory, tmp_path / "flash")
    answer(first, shared)
    ended(first)
    second = load(directory, tmp_path / "flash", max_num_batched_tokens=64)
    for seed in range(5):
        ids[second.add_request(shared + prompt(30, seed), greedily(8))] = seed
    outputs = run(second)
    for i, seed in ids.items():
        assert outputs[i].token_ids == plain.generate([shared + prompt(30, seed)], greedily(8))[0].token_ids
        assert outputs[i].num_cached_tokens >= 96
    assert second.stats()["flash"]["hits"] == 6
    ended(second)


def test_any_flipped_byte_is_a_miss(directory, plain, tmp_path):
    tokens = prompt(70)
    wanted, _ = answer(plain, tokens)
    first = load(directory, tmp_path / "flash")
    answer(first, tokens)
    ended(first)
    [file] = files(tmp_path / "flash")
    whole = file.read_bytes()
    hits = 0
    for at in range(0, len(whole), len(whole) // 60):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        file.write_bytes(damaged)
        llm = load(directory, tmp_path / "flash")
        ids, cached = answer(llm, tokens)
        assert ids == wanted
        hits += cached == 64
        llm._cache.check([])
        ended(llm)
        file.write_bytes(whole)
    assert hits < 60


def test_the_directory_goes_while_it_runs(directory, plain, tmp_path):
    llm = load(directory, tmp_path / "flash")
    answer(llm, prompt(80))
    shutil.rmtree(tmp_path / "flash")
    for seed in range(3):
        assert answer(llm, prompt(80, seed))[0] == answer(plain, prompt(80, seed))[0]
    ended(llm)


def test_reading_that_is_slower_than_computing_is_left(directory, tmp_path):
    """Once there are some reads to judge by."""
    first = load(directory, tmp_path / "flash")
    answer(first, prompt(330))
    ended(first)
    second = load(directory, tmp_path / "flash")
    second._cache.seconds_per_token = 1e-12
    assert answer(second, prompt(330)[:272])[1] == 256
    second._cache.seconds_per_token = 1e-12
    assert answer(second, prompt(330))[1] == 272
    assert second.stats()["compute_s_per_token"] > 1e-12  # measured again
    ended(second)


def test_no_numbers_are_not_kept(directory, plain, tmp_path, monkeypatch):
    """A request that ends in an error leaves nothing that poisons later processes."""
    tokens, steps = prompt(150), iter(range(100))
    first = load(directory, tmp_path / "flash", max_num_batched_tokens=64)
    store = reference.rope_store

    def broken(q, k, v, *others):
        store(q, k * float("nan") if next(steps) == 3 else k, v, *others)

    monkeypatch.setattr(reference, "rope_store", broken)
    assert first.generate([tokens], greedily(12))[0].finish_reason == "error"
    monkeypatch.undo()
    wanted, _ = answer(plain, tokens)
    assert answer(first, tokens)[0] == wanted
    ended(first)
    second = load(directory, tmp_path / "flash")
    assert answer(second, tokens)[0] == wanted
    ended(second)


def test_dynamic_rope_depends_on_the_length(directory, tmp_path):
    scaling = {"rope_scaling": {"type": "dynamic", "factor": 2}}
    first = load(directory, tmp_path / "flash", max_model_len=400, **scaling)
    answer(first, prompt(150))
    ended(first)
    second = load(directory, tmp_path / "flash", max_model_len=256, **scaling)
    assert answer(second, prompt(150)) == (answer(load(directory, max_model_len=256, **scaling), prompt(150))[0], 0)
    ended(second)


def test_an_abort_leaves_nothing_behind(directory, tmp_path):
    first = load(directory, tmp_path / "flash")
    answer(first, prompt(150))
    ended(first)
    second = load(directory, tmp_path / "flash")
    request = second.add_request(prompt(150) + prompt(100, 1), greedily(12))
    second.step()
    second.abort(request)
    second._cache.check(live(second))
    second._cache.forget()
    assert second._cache.num_free_pages == second._cache.config.num_pages
    ended(second)


def test_files_go_with_the_process_unless_they_are_to_stay(directory, tmp_path):
    code = (
        "import sys; from engine import LLM, SamplingParams; "
        "llm = LLM(sys.argv[1], threads=1, page_size=16, flash_cache_dir=sys.argv[2], "
        "flash_cache_persist=sys.argv[3] == 'yes'); "
        "llm.generate([list(range(3, 90))], SamplingParams(max_tokens=2))"
    )
    for stays in ("yes", "no"):
        flash = tmp_path / stays
        subprocess.run([sys.executable, "-c", code, directory, flash, stays], check=True, timeout=120)
        assert flash.exists() == (stays == "yes")
    [file] = files(tmp_path / "yes")
    assert file.stat().st_mode & 0o777 == 0o600 and (tmp_path / "yes").stat().st_mode & 0o777 == 0o700
    llm = load(directory, tmp_path / "gone", flash_cache_persist=False)
    answer(llm, prompt(80))
    del llm
    gc.collect()
    assert not (tmp_path / "gone").exists()


def test_one_process_at_a_time(directory, tmp_path):
    llm = load(directory, tmp_path / "flash")
    with pytest.raises(ConfigError, match=str(os.getpid())):
        load(directory, tmp_path / "flash")
    ended(llm)
    ended(load(directory, tmp_path / "flash"))


@pytest.mark.parametrize("changes", [{"flash_cache_persist": True}, {"flash_cache_size": 1 << 20},
                                     {"flash_cache_encrypt": True}])  # fmt: skip
def test_settings_of_a_flash_cache_that_there_is_not(directory, changes):
    with pytest.raises(ConfigError, match="flash_cache_dir"):
        load(directory, **changes)


def test_what_cannot_be_is_refused(directory, tmp_path):
    with pytest.raises(ConfigError, match=r"flash_cache_size|--flash-cache-size"):
        load(directory, tmp_path / "flash", flash_cache_size=4096)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="directory"):
        load(directory, tmp_path / "file")
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        load(directory, tmp_path / "flash", enable_prefix_caching=False)


def test_encrypted_pages_serve_their_process(directory, plain, tmp_path, monkeypatch):
    where = tmp_path / "flash"
    with pytest.raises(ConfigError, match="flash_cache_encrypt has a key that goes with the process"):
        load(directory, where, flash_cache_encrypt=True)
    llm, tokens = load(directory, where, flash_cache_encrypt=True, flash_cache_persist=False), prompt(150)
    wanted = answer(plain, tokens)
    assert answer(llm, tokens) == wanted
    llm._cache.forget()
    assert answer(llm, tokens) == (wanted[0], 144) and llm.stats()["flash"]["hits"] == 9
    ended(llm)
    assert list(where.glob("*.kv")) == []
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match=r"pip install 'isotherm\[crypto\]'"):
        load(directory, where, flash_cache_encrypt=True, flash_cache_persist=False)


def test_the_command(directory, tmp_path):
    command = [
        sys.executable, "-m", "engine.generate", "-m", directory, "-p", "a" * 90, "-n", "4", "--temp", "0", "--threads",
        "1", "--flash-cache-dir", tmp_path / "flash", "--flash-cache-persist", "--page-size", "16", "--json",
    ]  # fmt: skip
    reports = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout))
    assert reports[0]["token_ids"] == reports[1]["token_ids"]
    assert reports[0]["cache"]["flash"]["writes"] > 0
    assert reports[1]["cache"]["num_cached_tokens"] > 0 and reports[1]["cache"]["flash"]["hits"] > 0
