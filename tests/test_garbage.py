"""The garbage collector does not scan objects that stay."""

import gc
import weakref

import pytest

from refrain.engines.garbage import freeze_garbage


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before():
    yield
    gc.unfreeze()
    gc.enable()


def test_frozen_objects_are_not_scanned_again():
    before = gc.get_freeze_count()
    with freeze_garbage():
        assert not gc.isenabled()
        kept = [Cycle() for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)
    assert not {id(one) for one in kept} & {id(one) for one in gc.get_objects()}


def test_garbage_from_before_does_not_stay():
    gone = weakref.ref(Cycle())
    with freeze_garbage():
        thrown_away = weakref.ref(Cycle())
    assert gone() is None
    assert thrown_away() is None


def test_garbage_is_looked_for_again_after_an_error():
    with pytest.raises(ValueError, match="full"), freeze_garbage():
        raise ValueError("full")
    assert gc.isenabled()
