"""What can be wrong with a request or a tokenizer; the other errors come from the packages that know."""

from __future__ import annotations

from models.errors import shown

__all__ = ["RequestError", "TokenizerError", "shown"]


class TokenizerError(ValueError):
    """A tokenizer is missing, damaged, or does not fit the model; the message names the file and the reason."""


class RequestError(ValueError):
    """A prompt or a sampling parameter is not acceptable; the message names it, got and wanted."""
