"""Ctrl-C and SIGTERM, from the first moment of a command on. Imported before everything else, so it is small."""

import os
import signal
import sys


def exit_at_once() -> None:
    """Until a model is loaded there is nothing to clean up, and an exception inside an import of torch does not always
    come out as what it was: end the process on the spot."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))


def raise_exceptions() -> None:
    """From here on KeyboardInterrupt and SystemExit(143) leave through the code that cleans up."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
