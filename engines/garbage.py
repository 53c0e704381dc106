"""Keep long-lived objects out of Python's garbage collection.

A full collection scans all objects that torch and vLLM have created. In an engine it takes a fifth
of a second or more. It runs several times during their import, and sometimes in the middle of a
step.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def freeze_garbage() -> Generator[None]:
    """Collect garbage once, when the block ends. Later collections skip all objects made so far."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
