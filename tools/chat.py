"""`python -m engine.chat`: a conversation in the terminal, or with a message a line from a pipe.

The conversation goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from engine.cli import EXIT_CODES, did_you_mean, load, parser, rates, run, run_settings, show, words
from engine.config import EngineConfig, RequestOutput, SamplingParams
from engine.errors import RequestError, require_request
from engine.settings import flags
from engine.templates import ChatTemplate, Message, check_messages, find_template
from engine.tokenizer import check_text
from models.errors import require, shown
from models.files import read_object

if TYPE_CHECKING:
    from engine.llm import LLM

FORMAT = "isotherm-chat-1"
# What ends a command or a message, and not the session.
_ERRORS = tuple(kind for kind, code in EXIT_CODES.items() if code in (2, 3, 4))
# C0 and C1 controls but tab and newline: to a terminal they are commands, and no text may command it.
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd") | {9: "\t", 10: "\n", 13: ""}


def main(argv: list[str] | None = None) -> int:
    args = parser("chat").parse_args(argv)
    sampling, settings = run_settings(args)
    check_text(args.system or "", "the system prompt")
    system = [{"role": "system", "content": args.system}] if args.system else []
    source = find_template(EngineConfig(**settings), args.chat_template)
    llm, params = load(args.quiet, sampling, settings)
    llm.chat_template = ChatTemplate(source, llm.tokenizer)
    Session(llm, params, Console(), system, args.quiet).run()
    return 0


@dataclasses.dataclass
class Session:
    """A conversation and the commands on it. Errors end the command or the message, never the session."""

    llm: LLM
    params: SamplingParams
    console: Console
    system: list[Message]  # one or none
    quiet: bool
    turns: list[Message] = dataclasses.field(default_factory=list)
    generated: int = 0  # tokens of answers
    held: int = 0  # tokens where the last answer ended

    def run(self) -> None:
        """Until the input ends, or /exit."""
        if not self.quiet:
            sizes = f"chat template {self.llm.chat_template.source.name}, context {self.llm.max_model_len} tokens."
            self.console.note(f"{self.llm.config.model}: {sizes}\n/help lists the commands, Ctrl-D leaves")
        while True:
            try:
                self._next()
            except KeyboardInterrupt:  # noqa: PERF203 - somebody types between two of them
                if not self.console.interactive:
                    raise
                self.console.note("\nnothing was sent; /exit or Ctrl-D leaves")
            except EOFError:
                if self.console.interactive:
                    self.console.note("")
                return
            except _ERRORS as error:
                self.console.error(error)

    def _next(self) -> None:
        line = self.console.line("> ")
        if line.lstrip().startswith('"""'):
            self._send(self._block(line.lstrip()[3:]))
        elif line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            hint = did_you_mean(f"/{name}", [f"/{known}" for known in COMMANDS]) or "/help lists them."
            escape = '(a message that begins with / goes between """)'
            require_request(name in COMMANDS, f"unknown command /{name}: {hint} {escape}")
            COMMANDS[name](self, rest.strip())
        elif line.strip():
            self._send(line)

    def _block(self, line: str) -> str:
        """The lines of a message up to the closing quotes."""
        lines = [line]
        try:
            while not lines[-1].rstrip().endswith('"""'):
                lines.append(self.console.line("... "))
        except EOFError:
            self.console.error('the """ was not closed: the message is not sent')
            raise
        return "\n".join(lines).rstrip()[:-3].strip("\n")

    # A message and its answer.

    def _send(self, text: str) -> None:
        """Answer a message; it and what came of the answer become turns, or neither does."""
        asked: Message = {"role": "user", "content": text}
        ids = self.llm.chat_template.encode([*self.system, *self.turns, asked])
        sizes = f"{len(ids)} tokens with this message, max_model_len is {self.llm.max_model_len}"
        way = "it was not added: /clear, or leave and give a larger -c"
        require_request(len(ids) < self.llm.max_model_len, f"the conversation has {sizes}; {way}")
        outputs = self.llm.stream_chat(ids, self.params)
        if self.console.interactive:
            outputs = stoppable(outputs)
        with contextlib.closing(outputs):
            last, times = show((o for o in outputs if o.token_ids or o.finish_reason), self.console.write)
        self.console.write("\n" if last else "")
        if last is None or (last.finish_reason is None and not last.text.strip()):
            self.console.note("stopped before the answer: the message is taken back")
        elif last.finish_reason == "error":
            self.console.error("the model's output is not a number: there is no answer, the message is taken back")
        else:
            self.turns += [asked, {"role": "assistant", "content": last.text}]
            self._report(last, times)

    def _report(self, last: RequestOutput, times: list[float]) -> None:
        asked, said, limit = len(last.prompt_token_ids), len(last.token_ids), self.llm.max_model_len
        self.held = asked + said
        self.generated += said
        if last.finish_reason is None:
            self.console.note("stopped: the answer so far is kept")
        elif last.finish_reason == "length" and self.held >= limit:
            self.console.note(f"cut: the conversation fills max_model_len of {limit} tokens; /clear, or a larger -c")
        elif last.finish_reason == "length":
            self.console.note(f"cut: /set max_tokens allows more than {self.params.max_tokens} tokens")
        if not self.quiet:
            figures = rates(times, asked) | {"asked": asked, "said": said, "cached": last.num_cached_tokens}
            self.console.note(words("chat", "answer", figures))

    # The commands, by name. /help shows their docstrings.

    def do_help(self, rest: str) -> None:
        '''/help              this list
        """                begin a message of several lines, up to the next """; it may begin with /
        Ctrl-C             stop the answer; what is there of it stays'''
        self.console.note("\n".join(str(inspect.getdoc(do)) for do in COMMANDS.values()))

    def do_system(self, text: str) -> None:
        """/system [TEXT]     show or set the system prompt; "" is none"""
        if text:
            check_text(text, "the system prompt")
            self.system = [] if text == '""' else [{"role": "system", "content": text}]
        self.console.note(f"system prompt: {self.system[0]['content'] if self.system else 'the template decides'}")

    def do_set(self, rest: str) -> None:
        """/set [NAME VALUE]  show or set how answers are chosen, as /set temperature 0.7"""
        known = {flag["dest"]: flag["type"] for flag in flags(SamplingParams, {}).values() if "type" in flag}
        if rest:
            name, _, value = rest.partition(" ")
            sound = name in known and value != ""
            require_request(sound, f"/set takes a name and a value; names: {', '.join(known)}; got", rest)
            try:
                parsed: Any = None if value == "none" else known[name](value)
            except ValueError:
                raise RequestError(f"{name} must be a number, got {shown(value)}") from None
            self.params = dataclasses.replace(self.params, **{name: parsed})
        self.console.note(", ".join(f"{name} {getattr(self.params, name)}" for name in known))

    def do_clear(self, rest: str) -> None:
        """/clear             begin a new conversation; the system prompt stays"""
        self.turns = []
        self.console.note("a new conversation begins")

    def do_save(self, name: str) -> None:
        """/save FILE         write the conversation to a file that only you can read"""
        file = _file(name, "/save")
        saved = {"format": FORMAT, "model": self.llm.config.model, "messages": self.system + self.turns,
                 "settings": dataclasses.asdict(self.params)}  # fmt: skip
        try:
            require(file.is_file() or not file.exists(), f"{file}: not a regular file")
            with tempfile.TemporaryDirectory(dir=file.parent, prefix=".") as place:  # so it is the whole file or none
                with tempfile.NamedTemporaryFile("w", dir=place, delete=False, encoding="utf-8") as stream:
                    stream.write(json.dumps(saved, indent=1, ensure_ascii=False) + "\n")
                os.replace(stream.name, file)
        except OSError as error:
            raise RequestError(f"{file}: cannot be written: {error.strerror}") from None
        self.console.note(f"saved {len(self.turns)} messages to {file}")

    def do_load(self, name: str) -> None:
        """/load FILE         go on with a conversation that was saved"""
        file = Path(os.path.realpath(_file(name, "/load")))  # the user's own file: a link may lead anywhere
        saved: dict[str, Any] = read_object(file)
        require(saved.get("format") == FORMAT, f"{file}: not a saved conversation: format must be {FORMAT!r}")
        try:
            params = SamplingParams(**saved.get("settings"))  # type: ignore[arg-type]
        except TypeError as error:
            raise RequestError(f"{file}: settings are wrong: {error}") from None
        require(params.n == 1, f"{file}: n must be 1, got", params.n)
        messages: Any = saved.get("messages")
        if messages != []:
            check_messages(messages, last=("assistant", "system"))
        self.system = [message for message in messages if message["role"] == "system"]
        self.params, self.turns = params, messages[len(self.system) :]
        self.console.note(f"loaded {len(self.turns)} messages from {file}")
        if saved.get("model") != self.llm.config.model:
            self.console.note(f"they are of another model: {shown(saved.get('model'))}")

    def do_stats(self, rest: str) -> None:
        """/stats             tokens, speed and memory"""
        session = {"turns": len(self.turns) // 2, "held": self.held, "generated": self.generated}
        self.console.note(words("chat", "stats", self.llm.stats() | session))

    def do_exit(self, rest: str) -> None:
        """/exit              leave, as Ctrl-D does"""
        raise EOFError


COMMANDS = {name.removeprefix("do_"): do for name, do in vars(Session).items() if name.startswith("do_")}


def _file(name: str, command: str) -> Path:
    require_request(name != "" and "\0" not in name, f"{command} takes the name of a file")
    return Path(os.path.expanduser(name))


class Console:
    """On a terminal with a prompt, a history and colours; else the bare lines. The history lasts as long as the
    process: what is said is written to no file."""

    def __init__(self) -> None:
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # refused as a message, not here
        self.interactive = sys.stdin.isatty()
        colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and sys.stderr.isatty()
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if colours else ("", "")
        if self.interactive and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - input() then knows the arrow keys and earlier lines

    def line(self, prompt: str) -> str:
        """The next line, without its end. Raises EOFError at the end of the input."""
        # Where stdout is somewhere else, the prompt goes to stderr.
        with contextlib.redirect_stdout(sys.stdout if sys.stdout.isatty() else sys.stderr):
            return input(prompt if self.interactive else "").removesuffix("\r")

    def write(self, text: str) -> None:
        """A part of the conversation."""
        print(text.translate(_CONTROLS) if sys.stdout.isatty() else text, end="", flush=True)

    def note(self, text: str) -> None:
        print(f"{self._dim}{text.translate(_CONTROLS)}{self._plain}", file=sys.stderr, flush=True)

    def error(self, error: object) -> None:
        print(f"error: {error}".translate(_CONTROLS), file=sys.stderr, flush=True)


def stoppable(outputs: Generator[RequestOutput, None, None]) -> Generator[RequestOutput, None, None]:
    """The outputs up to Ctrl-C. While the model computes it is KeyboardInterrupt, at once: that step then counts as not
    done. Anywhere else an exception could lose pages of the cache, so it waits for the next moment between steps."""
    pressed: list[int] = []

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        while frame is not None:
            if frame.f_globals.get("__name__") == "engine.runner":
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(outputs):
            for output in outputs:
                yield output
                if pressed:
                    return
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    run(main)
