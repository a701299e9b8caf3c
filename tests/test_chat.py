"""LLM.chat, and `python -m engine.chat` as a user meets it: through a pipe and on a terminal."""

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
from oracle.checkpoint import make_checkpoint, random_weights, train_tokenizer, write_json, write_weights

from engine import LLM, ConfigError, RequestError, SamplingParams
from engine.config import EngineConfig
from engine.templates import ChatTemplate, find_template

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = Path.home() / ".cache" / "isotherm" / "models" / "smollm2-135m"
LIMIT = 120  # seconds after which a run hangs
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MODEL = ("-m", "tiny", "--threads", "1", "--dtype", "float32", "--temp", "0", "--ignore-eos", "-n", "8")
LONG = ("-m", "long", "--threads", "1", "-s", "1", "--ignore-eos", "-n", "100000")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """$ISOTHERM_MODELS: `tiny` with ChatML, `broken` (its answers are NaN), and `long`, whose answers never end."""
    root = tmp_path_factory.mktemp("models")
    for name, changes in (("tiny", {}), ("broken", {}), ("long", {"max_position_embeddings": 1 << 17})):
        config = make_checkpoint(root / name, vocab_size=354, **changes)
        (root / name / "tokenizer.model").write_bytes(train_tokenizer(352))
        flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        added = {str(352 + i): {"content": f"<|im_{end}|>", **flags} for i, end in enumerate(("start", "end"))}
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML, "added_tokens_decoder": added}
        write_json(root / name / "tokenizer_config.json", tokens)
    weights = random_weights(config, 0)
    weights["model.norm.weight"][:] = float("nan")
    write_weights(root / "broken", weights)
    return root


@pytest.fixture(scope="module")
def llm(models):
    return LLM(models / "tiny", threads=1, dtype="float32")


def user(*contents, system=None):
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


# The library.


def test_chat_answers_the_prompt_of_the_template(llm):
    messages = user("Who was warm?", "The cat.", "And cold?", system="Be brief.")
    output = llm.chat(messages, GREEDY)
    ids = llm.chat_template.encode(messages)
    assert output.prompt_token_ids == ids and ids[:2] == [1, 352]
    assert output.token_ids == llm.generate([ids], GREEDY)[0].token_ids
    assert (len(output.token_ids), output.finish_reason) == (8, "length")
    assert llm.stats()["kv_cache_usage"] == 0


def test_chat_stops_at_the_end_of_the_turn(llm, monkeypatch):
    messages = user("Who was warm?")
    free = llm.chat(messages, GREEDY)
    end = free.token_ids[4]
    assert end not in llm._engine.eos_ids and llm.chat_template.end_ids == {353}
    monkeypatch.setattr(llm.chat_template, "end_ids", frozenset([end]))
    stopped = llm.chat(messages, replace(GREEDY, ignore_eos=False))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(end) + 1] and stopped.finish_reason == "stop"
    assert free.text.startswith(stopped.text)
    assert llm.chat(messages, GREEDY).token_ids == free.token_ids  # ignore_eos


def test_stream_chat_grows_and_shows_the_steps_of_the_prompt(models):
    llm = LLM(models / "tiny", threads=1, dtype="float32", max_num_batched_tokens=16)
    messages = user("Who was warm? " * 4)
    outputs = list(llm.stream_chat(messages, GREEDY))
    lengths = [len(output.token_ids) for output in outputs]
    steps = -(-len(outputs[0].prompt_token_ids) // 16)
    assert lengths == [0] * (steps - 1) + list(range(1, 9)) and steps > 2
    assert outputs[-1].finish_reason == "length" and not any(output.finish_reason for output in outputs[:-1])
    assert all(b.text.startswith(a.text) for a, b in itertools.pairwise(outputs))
    assert outputs[-1].text == llm.chat(messages, GREEDY).text
    ids = llm.chat_template.encode(messages)
    assert list(llm.stream_chat(ids, GREEDY))[-1].token_ids == outputs[-1].token_ids


def test_leaving_a_stream_frees_its_pages(models):
    llm = LLM(models / "tiny", threads=1, dtype="float32", max_num_batched_tokens=16)
    for taken in (1, 5):  # within the prompt, within the answer
        with contextlib.closing(llm.stream_chat(user("Who was warm? " * 4), GREEDY)) as outputs:
            for _ in range(taken):
                next(outputs)
            assert llm.stats()["num_requests_running"] == 1
        assert llm.stats()["num_requests_running"] == 0 and llm.stats()["kv_cache_usage"] == 0


@pytest.mark.parametrize(
    "messages", [None, [], "hi", [None], [{"role": "user"}], user("a", "b"), [1.5], [True]], ids=repr
)
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(RequestError, match="message"):
        llm.chat(messages, GREEDY)
    assert llm.stats()["kv_cache_usage"] == 0


def test_one_answer_and_no_more_than_the_context(llm):
    with pytest.raises(RequestError, match="n must be 1, got 2"):
        llm.chat(user("a"), replace(GREEDY, n=2))
    with pytest.raises(RequestError, match=r"prompt has \d{3,} tokens, max_model_len is 512"):
        llm.chat(user("The cat sat. " * 200), GREEDY)


def test_without_template_or_tokenizer(models, tmp_path):
    make_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        LLM(tmp_path, threads=1, dtype="float32").chat(user("a"))
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        LLM(tmp_path, threads=1, dtype="float32", skip_tokenizer_init=True).chat(user("a"))


def test_another_template_can_be_assigned(models):
    llm = LLM(models / "tiny", threads=1, dtype="float32")
    llm.chat_template = ChatTemplate(find_template(llm.config, "llama2"), llm.tokenizer)
    output = llm.chat(user("a"), GREEDY)
    assert llm.tokenizer.decode(output.prompt_token_ids) == "[INST] a [/INST]"
    assert find_template(EngineConfig(model=str(models / "tiny"))).name == "chatml"


@pytest.mark.skipif(not (SMOLLM2 / "model.safetensors").is_file(), reason=f"no {SMOLLM2}")
def test_smollm2_answers():
    pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    llm = LLM(SMOLLM2, threads=1, max_model_len=512)
    output = llm.chat(user("What is the capital of France? One word."), SamplingParams(temperature=0, max_tokens=48))
    assert "Paris" in output.text and output.finish_reason == "stop" and output.token_ids[-1] == 2


# Through a pipe.


def environment(models, **changes):
    """Without the user's own models, caches and settings."""
    dropped = ("ISOTHERM", "HF_", "XDG", "PYTHON", "COVERAGE", "NO_COLOR", "TERM")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    own = {"ISOTHERM_MODELS": str(models), "ISOTHERM_CACHE": str(models / "none"), "HF_HOME": "/none"}
    return {**kept, **own, "TERM": "xterm", "HOME": str(models), **changes}


def command(*args):
    return [sys.executable, "-m", "engine.chat", *map(str, args)]


def talk(models, *lines, args=MODEL):
    """The finished process after these lines on stdin; its streams as text."""
    data = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(
        command(*args), input=data, cwd=ROOT, env=environment(models), capture_output=True, timeout=LIMIT,
        encoding="utf-8", errors="surrogateescape",
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


def answers(llm, *questions, system=None):
    """What a session says to these messages in turn."""
    turns, texts = [], []
    for question in questions:
        text = llm.chat([*user(system=system), *turns, *user(question)], GREEDY).text
        texts.append(text)
        turns += user(question, text)
    return texts


def test_a_message_a_line(models, llm):
    done = talk(models, "Who was warm?", "", "And cold?", args=(*MODEL, "--system", "Be brief."))
    assert done.returncode == 0
    expected = answers(llm, "Who was warm?", "And cold?", system="Be brief.")
    assert done.stdout == "".join(text + "\n" for text in expected)
    summary = r"^\[8 tokens, [\d.]+ tok/s, TTFT \d+ ms, prompt \d+ tokens, \d+ cached\]$"
    summaries = re.findall(summary, done.stderr, re.MULTILINE)
    assert len(summaries) == 2 and "\x1b" not in done.stderr + done.stdout
    assert done.stderr.count("cut: /set max_tokens") == 2


def test_quiet(models, llm):
    done = talk(
        models, "Who was warm?", args=(*MODEL, "-q", "-n", 500, "--stop", answers(llm, "Who was warm?")[0][3:6])
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_several_lines_and_text_that_is_no_command(models, llm, tmp_path):
    done = talk(models, '"""/help', "  indented", "", 'end"""', '"""one"""', f"/save {tmp_path / 'x'}")
    first = "/help\n  indented\n\nend"
    assert done.stdout == "".join(text + "\n" for text in answers(llm, first, "one"))
    assert [m["content"] for m in json.loads((tmp_path / "x").read_text())["messages"]][::2] == [first, "one"]


def test_a_block_that_is_not_closed(models):
    done = talk(models, '"""a', "b")
    assert (done.returncode, done.stdout) == (0, "") and 'error: the """ was not closed' in done.stderr


def test_commands(models, llm):
    done = talk(
        models, "/help", "/stats", "/set", "/set max_tokens 3", "a", "/stats", "/clear", "/set max_tokens 8", "a",
        "/system Be brief.", "/clear", "a", "/system", '/system ""', "/clear", "a", "/exit", "never asked",
    )  # fmt: skip
    assert done.returncode == 0
    short = llm.chat(user("a"), replace(GREEDY, max_tokens=3)).text
    plain, brief = answers(llm, "a")[0], answers(llm, "a", system="Be brief.")[0]
    assert done.stdout == "".join(text + "\n" for text in (short, plain, brief, plain))
    for part in (
        "/save FILE", "0 turns", "max_tokens 8, temperature 0.0", "max_tokens 3", "1 turns", "KV cache",
        "system prompt: Be brief.", "system prompt: the template decides", "tokens generated in this session",
    ):  # fmt: skip
        assert part in done.stderr, part


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("/sav x", ("unknown command /sav", "/save")), ("/xyzzy", ("unknown command", "/help")), ("/", ("unknown",)),
        ("/set temperature hot", ("temperature must be a number", "hot")),
        ("/set temperature nan", ("temperature", "nan")),
        ("/set max_tokens 0", ("max_tokens", "got 0")), ("/set n 4", ("max_tokens, temperature", "n 4")),
        ("/set top_k", ("name and a value",)), ("/save", ("name of a file",)), ("/load", ("name of a file",)),
        ("/save /nowhere/x", ("/nowhere/x", "cannot be written")), ("/load /nowhere/x", ("/nowhere/x", "no such file")),
        ("/save /dev/null", ("/dev/null", "not a regular file")), ("/load /dev/zero", ("not a regular file",)),
        ("/save a\0b", ("name of a file",)), ("bad \udcff byte", ("surrogate", "UTF-8")),
        ("/system \udcff", ("surrogate",)), ("The cat sat. " * 200, ("tokens", "512", "/clear", "-c")),
    ],
    ids=lambda value: value[:20].encode(errors="replace").decode() if isinstance(value, str) else "",
)  # fmt: skip
def test_errors_are_a_line_and_the_session_goes_on(session, line, parts):
    error = session.say(line)
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for part in parts:
        assert part in error


@pytest.fixture(scope="module")
def session(models):
    """One session for many wrong lines: each is followed by /clear, whose answer shows that it goes on."""
    process = subprocess.Popen(
        command(*MODEL, "-q"), cwd=ROOT, env=environment(models), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip

    def say(line):
        process.stdin.write(f"{line}\n/clear\n".encode(errors="surrogateescape"))
        process.stdin.flush()
        text = wait_for(process.stderr.fileno(), b"a new conversation begins\n").decode()
        return text.removesuffix("a new conversation begins\n")

    process.say = say
    yield process
    process.stdin.close()
    assert process.wait(LIMIT) == 0 and process.stdout.read() == b""
    process.stderr.close()
    process.stdout.close()


def test_save_and_load(models, llm, tmp_path):
    file = tmp_path / "a conversation.json"
    old = os.umask(0)
    try:
        talk(models, "/set top_k 7", "/system Be brief.", "Who was warm?", f"/save {file}", f"/save {file}")
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and os.listdir(tmp_path) == [file.name]
    saved = json.loads(file.read_text())
    assert saved["messages"][:2] == user("Who was warm?", system="Be brief.") and saved["model"] == "tiny"
    done = talk(models, f"/load {file}", "And cold?", "/set")
    assert done.stdout == answers(llm, "Who was warm?", "And cold?", system="Be brief.")[1] + "\n"
    assert "loaded 2 messages" in done.stderr and "top_k 7" in done.stderr


def test_save_keeps_the_old_file_when_it_fails(models, tmp_path):
    (tmp_path / "x").write_text("old")
    limited = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *command(*MODEL)]
    done = subprocess.run(
        limited, input=f"/save {tmp_path / 'x'}\n/stats\n", cwd=ROOT, env=environment(models), capture_output=True,
        timeout=LIMIT, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "cannot be written: File too large" in done.stderr and "0 turns" in done.stderr
    assert (tmp_path / "x").read_text() == "old" and os.listdir(tmp_path) == ["x"]


GOOD = {"format": "isotherm-chat-1", "model": "other", "messages": user("a", "b"), "settings": {"top_k": 5}}


def test_loads_that_are_refused_change_nothing(models, llm, tmp_path):
    bad = [
        "[1]", "{", json.dumps({}), json.dumps(GOOD | {"format": 2}), json.dumps(GOOD | {"messages": user("a")}),
        json.dumps(GOOD | {"messages": None}), json.dumps(GOOD | {"messages": [5]}),
        json.dumps(GOOD | {"settings": []}),
        json.dumps(GOOD | {"settings": {"x": 1}}), json.dumps(GOOD | {"settings": {"top_p": float("nan")}}),
        json.dumps(GOOD | {"settings": {"n": 2}}), "\0" * 100,
    ]  # fmt: skip
    for i, text in enumerate(bad):
        (tmp_path / str(i)).write_text(text)
    (tmp_path / "good").write_text(json.dumps(GOOD))
    done = talk(
        models, *(f"/load {tmp_path / str(i)}" for i in range(len(bad))), "a", "/clear", f"/load {tmp_path}/good"
    )
    assert done.returncode == 0 and done.stdout == answers(llm, "a")[0] + "\n"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(bad) and all(str(tmp_path) in line or "must be" in line for line in errors), errors
    assert "loaded 2 messages" in done.stderr and "another model: 'other'" in done.stderr


def test_a_full_context_is_said(models):
    done = talk(models, "The cat", "again", args=(*MODEL, "-c", "40", "-n", "30"))
    assert done.returncode == 0 and "fills max_model_len of 40 tokens" in done.stderr
    assert re.search(r"error: the conversation has \d+ tokens with this message, max_model_len is 40", done.stderr)
    assert "/clear" in done.stderr and "-c" in done.stderr


def test_an_answer_that_fails(models):
    done = talk(models, "a", "/stats", args=("-m", "broken", "--threads", "1", "--dtype", "float32"))
    assert done.returncode == 0 and "error: the model's output is not a number" in done.stderr
    assert "0 turns" in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        ((), 2, "--model"),
        (("-m", "tiny", "--temp", "nan"), 2, "temperature"),
        (("-m", "tiny", "--chat-template", "nope"), 2, "llama2, chatml or a file"),
        (("-m", "tiny", "--system", "\udcff"), 2, "surrogate"),
        (("-m", "tiny", "-c", "100000"), 3, "max_model_len"),
        (("-m", "missing"), 3, "missing"),
    ],
)
def test_errors_before_the_session(models, args, code, part):
    done = talk(models, "a", args=(*args, "--threads", "1") if args else ())
    assert done.returncode == code and part in done.stderr and done.stdout == ""


def test_interrupt_ends_a_session_on_a_pipe(models):
    process = subprocess.Popen(
        command(*LONG), cwd=ROOT, env=environment(models), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdin.write(b"a\nb\n")
    process.stdin.flush()
    wait_for(process.stdout.fileno(), b"")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 130 and b"Traceback" not in stderr


# On a terminal.


def wait_for(fd, mark, limit=LIMIT):
    """Read until the mark (or anything, for b"") has come; returns what was read."""
    seen, end = b"", time.monotonic() + limit
    while mark not in seen or not seen:
        assert select.select([fd], [], [], max(0, end - time.monotonic()))[0], f"no {mark!r} in {seen!r}"
        more = os.read(fd, 4096)
        assert more, f"ended before {mark!r}: {seen!r}"
        seen += more
    return seen


class Terminal:
    """A session on a terminal of its own, where Ctrl-C is a key."""

    def __init__(self, models, *args, **env):
        self.fd, child = pty.openpty()
        self.process = subprocess.Popen(
            command(*args), cwd=ROOT, env=environment(models, **env), stdin=child, stdout=child, stderr=child,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(child)

    def until(self, mark):
        return wait_for(self.fd, mark).decode(errors="replace").replace("\r\n", "\n")

    def type(self, keys):
        os.write(self.fd, keys.encode())

    def ask(self, line, mark="> "):
        """Type a line; what comes up to the next prompt."""
        self.type(line + "\n")
        return self.until(b"\n" + mark.encode() if mark == "> " else mark.encode())

    def end(self):
        self.type("\x04")
        rest = b""
        with contextlib.suppress(OSError):  # EIO: the terminal is gone
            while more := os.read(self.fd, 4096):
                rest += more
        return self.process.wait(LIMIT), rest.decode(errors="replace")


@pytest.fixture
def terminal(models):
    opened = []

    def start(*args, **env):
        opened.append(Terminal(models, *args, **{"TERM": "dumb", **env}))
        opened[-1].until(b"> ")
        return opened[-1]

    yield start
    for one in opened:
        one.process.kill()
        one.process.wait()
        os.close(one.fd)


def test_a_conversation_on_a_terminal(terminal, llm):
    one = terminal(*MODEL)
    first, second = answers(llm, "Who was warm?", "And cold?")
    assert shown(first) in one.ask("Who was warm?")
    seen = one.ask("And cold?")
    assert shown(second) in seen and "[8 tokens" in seen and "\x1b" not in seen
    one.type('"""two\n')
    one.until(b"... ")
    assert "[8 tokens" in one.ask('lines"""')
    assert "/help" in one.ask("/nope")
    code, rest = one.end()
    assert code == 0 and "Traceback" not in rest


def shown(text):
    """As a terminal is sent it."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def test_interrupt_stops_the_answer_and_keeps_it(terminal, tmp_path):
    one = terminal(*LONG)
    one.type("Who was warm?\n")
    one.until(b"\n")
    time.sleep(0.5)
    one.type("\x03")
    seen = one.until(b"\n> ")
    assert "stopped: the answer so far is kept" in seen and "tok/s" in seen and "Traceback" not in seen
    assert "1 turns" in one.ask("/stats")
    one.ask("/set max_tokens 4")
    assert "[4 tokens" in one.ask("And cold?")
    one.ask(f"/save {tmp_path / 'x'}")
    messages = json.loads((tmp_path / "x").read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 and len(messages[1]["content"]) > 2
    assert one.end()[0] == 0


def test_interrupt_while_the_prompt_is_read(terminal, tmp_path):
    saved = GOOD | {"messages": user("The cat sat near the stove. " * 4000, "b")}
    (tmp_path / "x").write_text(json.dumps(saved))
    one = terminal(*LONG)
    one.ask(f"/load {tmp_path / 'x'}")
    one.type("Who was warm?\n")
    time.sleep(1)
    begin = time.monotonic()
    one.type("\x03")
    assert "stopped before the answer: the message is taken back" in one.until(b"\n> ")
    assert time.monotonic() - begin < 20
    assert "1 turns" in one.ask("/stats")
    one.ask("/clear")
    one.ask("/set max_tokens 4")
    assert "[4 tokens" in one.ask("Who was warm?")
    assert one.end()[0] == 0


def test_interrupt_at_the_prompt_reminds_of_exit(terminal):
    one = terminal(*MODEL)
    for typed in ("", "half a mess"):
        one.type(typed)
        time.sleep(0.2)
        one.type("\x03")
        assert "/exit or Ctrl-D leaves" in one.until(b"\n> ")
    one.type('"""half\n')
    one.until(b"... ")
    time.sleep(0.2)  # readline writes its prompt before it hears Ctrl-C
    one.type("\x03")
    one.until(b"\n> ")
    assert "0 turns" in one.ask("/stats")
    one.type("/exit\n")
    assert one.process.wait(LIMIT) == 0


@pytest.mark.parametrize("env", [{"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}], ids=repr)
def test_colours(terminal, env):
    one = terminal(*MODEL, **env)
    assert ("\x1b[2m" in one.ask("/stats")) == (env == {"TERM": "xterm"})


def test_terminate(terminal):
    one = terminal(*LONG)
    one.type("a\n")
    time.sleep(0.5)
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(LIMIT) == 143
