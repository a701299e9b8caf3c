"""What can be wrong with a request or a tokenizer; the other errors come from the packages that know."""

import functools

from models.errors import require


class TokenizerError(ValueError):
    """A tokenizer is missing, damaged, or does not fit the model; the message names the file and the reason."""


class RequestError(ValueError):
    """A prompt or a sampling parameter is not acceptable; the message names it, got and wanted."""


require_request = functools.partial(require, error=RequestError)
