"""Chat templates in jinja2, rendered in a process of their own.

A template comes from whoever made the checkpoint. jinja2's sandbox keeps it from the interpreter, but not from loops
that never end or texts of gigabytes: so the process is ended by the kernel after a second of computing, its memory is
limited, and so is what it may write. It starts for every prompt, in about a tenth of a second.
"""

import contextlib
import datetime
import functools
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from engine.errors import RequestError, require_request
from models.errors import ConfigError, require_config

SECONDS = 1.0  # of computing, for all renderings of a prompt, without the start of the process
CHARACTERS = 1_000_000  # of a rendering, beside those of its messages
_MEMORY = 256 << 20
_WALL_SECONDS = 60.0  # on a machine with better things to do
_START = "import sys; sys.path[:0] = sys.argv[1:]; from engine.jinja_worker import work; work()"

Conversation = list[dict[str, str]]


def render(template: str, conversations: list[Conversation], variables: dict[str, str], origin: str) -> list[str]:
    """The conversations as text, each with the beginning of the next answer.

    Raises RequestError with the template's own words if it refuses them; ConfigError naming `origin` if it is broken
    or exceeds a limit.
    """
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START, root, *filter(None, sys.path)]
    job = json.dumps({"template": template, "conversations": conversations, "variables": variables}).encode()
    try:
        # A session of its own: Ctrl-C is not for it.
        done = subprocess.run(command, input=job, capture_output=True, timeout=_WALL_SECONDS, start_new_session=True)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{origin}: the chat template was not done after {_WALL_SECONDS:.0f} s") from None
    require_config(done.returncode != -signal.SIGPROF, f"{origin}: the chat template takes more than {SECONDS:.0f} s")
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"its process ended: {done.returncode}"
    kind, _, words = last.partition(": ")
    require_request(done.returncode == 0 or kind != RequestError.__name__, words)
    require_config(done.returncode == 0, f"{origin}: the chat template fails: {last}")
    return list(json.loads(done.stdout))


def work() -> None:
    """The process: a job on stdin, its result on stdout; or what is wrong with the template on stderr."""
    job = sys.stdin.read()
    import jinja2  # its import is not the template's time

    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # whose signal ends the process, also within C code
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system knows this limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY + 16 * len(job),) * 2)
    try:
        texts = render_here(**json.loads(job))
    except Exception as error:  # whatever an expression can raise
        kind = f"line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else type(error).__name__
        sys.exit(f"{kind}: {str(error)[:300] or 'too much memory'}".replace("\n", " "))
    sys.stdout.write(json.dumps(texts))


def render_here(template: str, conversations: list[Conversation], variables: dict[str, str]) -> list[str]:
    """With the settings, filters and functions that Transformers gives."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise RequestError(f"the chat template refuses this conversation: {message}")

    now = datetime.datetime.now()  # the same in all renderings, which are compared
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    jinja.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    jinja.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime}
    compiled = jinja.from_string(template)
    texts = []
    for messages in conversations:
        text = compiled.render(**variables, messages=messages, tools=None, documents=None, add_generation_prompt=True)
        if len(text) > CHARACTERS + sum(len(message["content"]) for message in messages):
            raise ValueError(f"it writes more than {CHARACTERS:,} characters beside the messages")
        texts.append(text)
    return texts
