"""`python -m engine.chat`: a conversation in the terminal, or with a message a line from a pipe.

The conversation goes to stdout, everything else to stderr.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports take their time
    from engine.signals import exit_at_once

    exit_at_once()

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.arguments import Parser
from engine.cli import add_run_flags, rates, run, run_settings, show, with_defaults
from engine.config import EngineConfig
from engine.console import Console, stoppable, until
from engine.errors import RequestError, TokenizerError, shown
from engine.request import RequestOutput, SamplingParams
from engine.signals import raise_exceptions
from engine.templates import ChatTemplate, Message, check_messages, find_template
from memory.errors import CapacityError
from models.errors import ConfigError, ModelFormatError
from models.files import read_object

if TYPE_CHECKING:
    from engine.llm import LLM

MAX_TOKENS = 512  # of an answer, where no flag says another number
FORMAT = "isotherm-chat-1"
# What ends a command or a message, and not the session.
_ERRORS = (RequestError, ConfigError, ModelFormatError, TokenizerError, CapacityError)

HELP = '''\
/help              this list
/system [TEXT]     show or set the system prompt; "" is none
/set [NAME VALUE]  show or set how answers are chosen, as /set temperature 0.7
/clear             begin a new conversation; the system prompt stays
/save FILE         write the conversation to a file that only you can read
/load FILE         go on with a conversation that was saved
/stats             tokens, speed and memory
/exit              leave, as Ctrl-D does
"""                begin a message of several lines, up to the next """; it may begin with /
Ctrl-C             stop the answer; what is there of it stays'''


def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m engine.chat", description="Talk with a Llama model; /help lists the commands.")
    add_run_flags(parser, max_tokens=MAX_TOKENS)
    chat = parser.add_argument_group("chat")
    chat.add_argument("--system", metavar="TEXT", help="system prompt (default: the chat template's)")
    chat.add_argument(
        "--chat-template", metavar="NAME", help="llama2, chatml or a file (default: the checkpoint's own template)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    flags, settings = run_settings(args)
    if args.system:
        check_messages([{"role": "system", "content": args.system}], last="system")
    source = find_template(EngineConfig(**settings), args.chat_template)
    from engine.llm import LLM

    llm = LLM(progress=not args.quiet, **settings)
    assert llm.tokenizer is not None
    llm.chat_template = ChatTemplate(source, llm.tokenizer)
    raise_exceptions()
    params = with_defaults({"max_tokens": MAX_TOKENS} | flags, llm.generation_config, args.quiet)
    Session(llm, params, Console(), args.system, args.quiet).run()
    return 0


class Leave(Exception):
    """/exit."""


class Session:
    """A conversation and the commands on it. Errors end the command or the message, never the session."""

    def __init__(self, llm: LLM, params: SamplingParams, console: Console, system: str | None, quiet: bool) -> None:
        self.llm = llm
        self.params = params
        self.console = console
        self.system = system or None
        self.quiet = quiet
        self.turns: list[Message] = []
        self.last: RequestOutput | None = None
        self.generated = 0  # tokens, and the seconds and tokens behind the first ones of their answers
        self.seconds = 0.0
        self.steps = 0
        self.commands: dict[str, Callable[[str], None]] = {
            "help": self._help, "system": self._system, "set": self._set, "clear": self._clear, "save": self._save,
            "load": self._load, "stats": self._stats, "exit": self._exit, "quit": self._exit,
        }  # fmt: skip

    def run(self) -> None:
        """Until the input ends, or /exit."""
        if not self.quiet:
            template = self.llm.chat_template.source.name
            self.console.note(
                f"{self.llm.config.model}: chat template {template}, context {self.llm.max_model_len} tokens. "
                "/help lists the commands, Ctrl-D leaves"
            )
        while self._goes_on():
            pass

    def _goes_on(self) -> bool:
        """Read one message or command and do it; whether there may be another."""
        try:
            self._next()
        except KeyboardInterrupt:
            if not self.console.interactive:
                raise
            self.console.note("\nnothing was sent; /exit or Ctrl-D leaves")
        except EOFError:
            if self.console.interactive:
                self.console.note("")
            return False
        except Leave:
            return False
        except _ERRORS as error:
            self.console.error(error)
        return True

    def _next(self) -> None:
        line = self.console.line("> ")
        if line.lstrip().startswith('"""'):
            self._send(self._block(line.lstrip()[3:]))
        elif line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            if name not in self.commands:
                near = difflib.get_close_matches(name, self.commands, n=1)
                hint = f"did you mean /{near[0]}?" if near else "/help lists them."
                raise RequestError(f'unknown command /{name}: {hint} (a message that begins with / goes between """)')
            self.commands[name](rest.strip())
        elif line.strip():
            self._send(line)

    def _block(self, line: str) -> str:
        """The lines of a message up to the closing quotes."""
        lines = []
        try:
            while not line.rstrip().endswith('"""'):
                lines.append(line)
                line = self.console.line("... ")
        except EOFError:
            self.console.error('the """ was not closed: the message is not sent')
            raise
        return "\n".join([*lines, line.rstrip()[:-3]]).strip("\n")

    # A message and its answer.

    def _messages(self) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def _send(self, text: str) -> None:
        """Answer a message; it and what came of the answer become turns, or neither does."""
        asked: Message = {"role": "user", "content": text}
        ids = self.llm.chat_template.encode([*self._messages(), asked])
        if len(ids) >= self.llm.max_model_len:
            raise RequestError(
                f"the conversation has {len(ids)} tokens with this message, max_model_len is {self.llm.max_model_len} "
                "with at least one for the answer; it is never cut, and the message was not added: /clear begins a new "
                "conversation, a larger -c holds a longer one"
            )
        with stoppable() as stop, contextlib.closing(self.llm.stream_chat(ids, self.params)) as outputs:
            last, times = show(until(stop, outputs), self.console.write)
        if last is not None:
            self.console.write("\n")
        if stop.pressed and not self.console.interactive:
            raise KeyboardInterrupt
        if last is not None and last.finish_reason == "error":
            self.console.error("the model's output is not a number: there is no answer, the message is taken back")
            return
        if last is None or (last.finish_reason is None and not last.text.strip()):
            self.console.note("stopped before the answer: the message is taken back")
            return
        self.turns += [asked, {"role": "assistant", "content": last.text}]
        self.last = last
        self._report(last, times)

    def _report(self, last: RequestOutput, times: list[float]) -> None:
        speed = rates(times, len(last.prompt_token_ids))
        self.generated += len(last.token_ids)
        self.steps += len(times) - 2
        self.seconds += times[-1] - times[1]
        if last.finish_reason is None:
            self.console.note("stopped: the answer so far is kept")
        elif last.finish_reason == "length":
            used, limit = len(last.prompt_token_ids) + len(last.token_ids), self.llm.max_model_len
            why = f"/set max_tokens allows more than {self.params.max_tokens} tokens"
            if used >= limit:
                why = f"the conversation fills max_model_len of {limit} tokens; /clear, or a larger -c"
            self.console.note(f"cut: {why}")
        if not self.quiet:
            decode = f", {speed['decode_tok_s']:.1f} tok/s" if speed["decode_tok_s"] else ""
            self.console.note(
                f"[{len(last.token_ids)} tokens{decode}, TTFT {speed['ttft_s'] * 1e3:.0f} ms, "
                f"prompt {len(last.prompt_token_ids)} tokens]"
            )

    # Commands.

    def _help(self, rest: str) -> None:
        self.console.note(HELP)

    def _exit(self, rest: str) -> None:
        raise Leave

    def _clear(self, rest: str) -> None:
        self.turns = []
        self.console.note("a new conversation begins")

    def _system(self, text: str) -> None:
        if text:
            new = None if text == '""' else text
            check_messages([{"role": "system", "content": text}], last="system")
            self.system = new
        self.console.note(f"system prompt: {self.system or 'the template decides'}")

    def _set(self, rest: str) -> None:
        fields = {field.name: field for field in dataclasses.fields(SamplingParams) if field.metadata}
        if rest:
            name, _, value = rest.partition(" ")
            if name not in fields or not value:
                raise RequestError(f"/set takes a name and a value; names: {', '.join(fields)}; got {shown(rest)}")
            optional = fields[name].default is None
            parse = fields[name].metadata["parse"]
            try:
                parsed = None if optional and value == "none" else parse(value)
            except ValueError:
                raise RequestError(f"{name} must be a number, got {shown(value)}") from None
            changes: dict[str, Any] = {name: parsed}
            self.params = dataclasses.replace(self.params, **changes)
        self.console.note(", ".join(f"{name} {getattr(self.params, name)}" for name in fields))

    def _save(self, name: str) -> None:
        file = _file(name, "/save")
        settings = {field.name: getattr(self.params, field.name) for field in dataclasses.fields(self.params)}
        saved = {"format": FORMAT, "model": self.llm.config.model, "messages": self._messages(), "settings": settings}
        try:
            if file.exists() and not file.is_file():
                raise RequestError(f"{file}: not a regular file")
            _write_atomically(file, json.dumps(saved, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise RequestError(f"{file}: cannot be written: {error.strerror}") from None
        self.console.note(f"saved {len(self.turns)} messages to {file}")

    def _load(self, name: str) -> None:
        file = Path(os.path.realpath(_file(name, "/load")))  # the user's own file: a link may lead anywhere
        saved: dict[str, Any] = read_object(file)
        if saved.get("format") != FORMAT:
            raise RequestError(f"{file}: not a saved conversation: format must be {FORMAT!r}")
        messages: Any = saved.get("messages")
        settings: Any = saved.get("settings")
        if not isinstance(settings, dict):
            raise RequestError(f"{file}: settings must be an object, got {shown(settings)}")
        if unknown := settings.keys() - SamplingParams.__dataclass_fields__.keys():
            raise RequestError(f"{file}: unknown settings: {', '.join(sorted(map(shown, unknown)))}")
        params = SamplingParams(**settings)
        if params.n != 1:
            raise RequestError(f"{file}: n must be 1, got {params.n}")
        system = None
        if messages != []:
            shape = messages[0] if isinstance(messages, list) and len(messages) == 1 else None
            only_system = isinstance(shape, dict) and shape.get("role") == "system"
            check_messages(messages, last="system" if only_system else "assistant")
            system = messages[0]["content"] if messages[0]["role"] == "system" else None
        self.system, self.params = system or None, params
        self.turns = messages[1:] if system is not None else messages
        self.console.note(f"loaded {len(self.turns)} messages from {file}")
        if saved.get("model") != self.llm.config.model:
            self.console.note(f"they are of another model: {shown(saved.get('model'))}")

    def _stats(self, rest: str) -> None:
        stats = self.llm.stats()
        cache = self.last.cache_report["resident_bytes"] if self.last else 0
        held = len(self.last.prompt_token_ids) + len(self.last.token_ids) if self.last else 0
        speed = f", {self.steps / self.seconds:.1f} tok/s" if self.seconds else ""
        self.console.note(
            f"{len(self.turns) // 2} turns; the last answer ended at {held} of {stats['max_model_len']} tokens\n"
            f"{self.generated} tokens generated in this session{speed}\n"
            f"KV cache {cache / 1e6:.1f} MB of {stats['kv_capacity_bytes'] / 1e6:.1f} MB, weights "
            f"{stats['weights_bytes'] / 1e6:.1f} MB, peak memory {stats['peak_rss_bytes'] / 1e9:.2f} GB"
        )


def _file(name: str, command: str) -> Path:
    if not name or "\0" in name:
        raise RequestError(f"{command} takes the name of a file")
    return Path(os.path.expanduser(name))


def _write_atomically(file: Path, text: str) -> None:
    """The whole file or none of it, for the owner alone."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


if __name__ == "__main__":
    run(main)
