"""Python's search for garbage, kept away from what stays.

A full one goes through all that torch and vLLM have made: a fifth of a second and more in an
engine, several times while they are imported, and now and then in the middle of a step.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def made_to_stay() -> Generator[None]:
    """Garbage is looked for once, when this ends, and never again among what is there then."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
