"""The terminal of `engine.chat`: lines in, text out, and what Ctrl-C means while an answer grows (no torch)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Generator
from threading import Event
from types import FrameType

from engine.request import RequestOutput

# C0 and C1 controls but tab and newline: to a terminal they are commands, and no text may command it.
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd") | {9: "\t", 10: "\n", 13: ""}

Outputs = Generator[RequestOutput, None, None]


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


def stoppable(outputs: Outputs) -> Outputs:
    """The outputs up to Ctrl-C. While the model computes it is KeyboardInterrupt, at once: that step then counts as not
    done. Anywhere else an exception could lose pages of the cache, so it waits for the next moment between steps."""
    pressed = Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        pressed.set()
        while frame is not None:
            if frame.f_globals.get("__name__") == "engine.runner":
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(outputs):
            for output in outputs:
                yield output
                if pressed.is_set():
                    return
    finally:
        signal.signal(signal.SIGINT, before)
