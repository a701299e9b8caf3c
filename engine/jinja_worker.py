"""Chat templates in jinja2, rendered in a process of their own.

A template comes from whoever made the checkpoint. jinja2's sandbox keeps it from the interpreter, but not from loops
that never end or texts of gigabytes: so the process is ended by the kernel after a second of computing, its memory is
limited, and so is what it may write. It starts for every prompt, in about a tenth of a second.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import RequestError
from models.errors import ConfigError

SECONDS = 1.0  # of computing, for all renderings of a prompt, without the start of the process
CHARACTERS = 1_000_000  # of a rendering, beside those of its messages
_MEMORY = 256 << 20
_WALL_SECONDS = 60.0  # on a machine with better things to do
_START = "import sys; sys.path[:0] = sys.argv[1:]; from engine.jinja_worker import work; work()"


def render(
    template: str, conversations: list[list[dict[str, str]]], variables: dict[str, str], origin: str
) -> list[str]:
    """The conversations as text, each with the beginning of the next answer.

    Raises RequestError with the template's own words if it refuses them; ConfigError naming `origin` if it is broken
    or exceeds a limit.
    """
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-I", "-S", "-c", _START, root, *filter(None, sys.path)]
    job = json.dumps({"template": template, "conversations": conversations, "variables": variables})
    try:
        # A session of its own: Ctrl-C is not for it.
        done = subprocess.run(
            command, input=job.encode(), capture_output=True, timeout=_WALL_SECONDS, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{origin}: the chat template was not done after {_WALL_SECONDS:.0f} s") from None
    if done.returncode == -signal.SIGPROF:
        raise ConfigError(f"{origin}: the chat template computes for more than {SECONDS:.0f} s")
    try:
        result = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"{origin}: rendering the chat template ended with {done.returncode}: {last}") from None
    if "refused" in result:
        raise RequestError(f"the chat template refuses this conversation: {result['refused']}")
    if "broken" in result:
        raise ConfigError(f"{origin}: the chat template fails: {result['broken']}")
    return list(result["texts"])


def work() -> None:
    """The process: a job on stdin, its result on stdout."""
    job = json.load(sys.stdin)
    import jinja2  # its import is not the template's time

    _limit(len(json.dumps(job)))
    try:
        result: dict[str, Any] = {"texts": render_here(**job)}
    except _Refused as error:
        result = {"refused": _short(error)}
    except (MemoryError, RecursionError) as error:
        result = {"broken": f"{type(error).__name__}: it needs too much memory"}
    except jinja2.TemplateSyntaxError as error:
        result = {"broken": f"line {error.lineno}: {_short(error)}"}
    except Exception as error:  # whatever an expression can raise
        result = {"broken": f"{type(error).__name__}: {_short(error)}"}
    sys.stdout.write(json.dumps(result))


class _Refused(Exception):
    """What a template said to raise_exception."""


def _limit(size: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # whose signal ends the process, also within C code
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system knows this limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY + 16 * size,) * 2)


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 300 else text[:297] + "..."


def render_here(template: str, conversations: list[list[dict[str, str]]], variables: dict[str, str]) -> list[str]:
    """With the settings, filters and functions that Transformers gives."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    now = datetime.datetime.now()  # the same in all renderings, which are compared

    def raise_exception(message: str) -> NoReturn:
        raise _Refused(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime}
    compiled = environment.from_string(template)
    texts = []
    for messages in conversations:
        most = CHARACTERS + sum(len(message["content"]) for message in messages)
        pieces, length = [], 0
        for piece in compiled.generate(
            **variables, messages=messages, tools=None, documents=None, add_generation_prompt=True
        ):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                raise ValueError(f"it writes more than {CHARACTERS:,} characters beside the messages")
        texts.append("".join(pieces))
    return texts
