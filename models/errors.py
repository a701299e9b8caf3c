"""What can be wrong with a model that a user brings."""

import functools


def shown(value: object) -> str:
    """A value for a message, short whatever it is: Python refuses to print integers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        text = f"{type(value).__name__} of very many digits"
    return text if len(text) <= 80 else text[:77] + "..."


class ModelFormatError(ValueError):
    """A model file is missing, damaged, or not what it should be; the message names the file and the reason."""


class ConfigError(ValueError):
    """A configuration value is missing, out of range, or not supported; the message names the key, got and wanted."""


def require(fulfilled: bool, problem: str, *got: object, error: type[ValueError] = ModelFormatError) -> None:
    """What a file must be. Raises `error` of the problem and what there is instead, to be shown."""
    if not fulfilled:
        raise error(" ".join([problem, *map(shown, got)]))


require_config = functools.partial(require, error=ConfigError)
