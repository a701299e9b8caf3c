"""What can be wrong with a request or a tokenizer; the other errors come from the packages that know."""

from __future__ import annotations


def shown(value: object) -> str:
    """A value for a message, short whatever it is: Python refuses to print integers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        text = f"{type(value).__name__} of very many digits"
    return text if len(text) <= 80 else text[:77] + "..."


class TokenizerError(ValueError):
    """A tokenizer is missing, damaged, or does not fit the model; the message names the file and the reason."""


class RequestError(ValueError):
    """A prompt or a sampling parameter is not acceptable; the message names it, got and wanted."""
