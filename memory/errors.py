"""Errors of the memory package that reach the caller of the engine. `engine` re-exports them."""


class CapacityError(RuntimeError):
    """The request, the model or the cache does not fit the memory there is. The message carries both numbers."""


class AllocatorError(RuntimeError):
    """Memory was freed twice, or freed by who never had it: our bug, but raised in every build (never an `assert`),
    because going on would hand one page to two requests."""
