"""Triton 3.9's interpreter, two to three times as fast: for what runs many programs in it."""

import dataclasses
import types

import triton.language as tl
from triton.runtime import interpreter


def hurry() -> None:
    """Have the interpreter patch the language once instead of at each launch and call of a helper, and look for no
    overflow of int32. For the rest of the process."""
    set_options(sanitize_overflow=False)
    names_language = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang(names_language)
    interpreter._patch_lang = lambda fn: types.SimpleNamespace(restore=lambda: None)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


def set_options(**options: bool) -> None:
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, **options)
