"""What can be wrong with a model that a user brings."""

from __future__ import annotations


class ModelFormatError(ValueError):
    """A model file is missing, damaged, or not what it should be; the message names the file and the reason."""


class ConfigError(ValueError):
    """A configuration value is missing, out of range, or not supported; the message names the key, got and wanted."""
