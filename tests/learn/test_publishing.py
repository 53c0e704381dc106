"""The trainer publishes its weights as a file, one tensor at a time."""

import weakref
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import safetensors.torch
import torch
from torch import Tensor

from refrain.engines.learn.publishing import WholeTensors, publish, written
from refrain.engines.weights_file import VersionFiles, check_file
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import started


@pytest.fixture
def files() -> Iterator[VersionFiles]:
    made = VersionFiles(num_kept=2)
    yield made
    made.delete()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_file_has_what_the_buffer_has(
    make_config: Callable[..., TrainConfig], files: VersionFiles, dtype: str
) -> None:
    config = make_config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    learner = started(config)
    for version in range(4):  # The last two reuse memory of earlier versions.
        with torch.no_grad():
            for parameter in learner._policy.parameters():
                parameter.mul_(1.1)
        path = publish(learner.to_publish(), version, files)
        check_file(path, version)
        expected = safetensors.torch.load(learner.weights_buffer())
        found = safetensors.torch.load_file(path)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype == getattr(torch, dtype)
            assert torch.equal(tensor, expected[name]), name


def made(num: int, size: int, alive: list) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors one by one, as a gather does. Append to `alive` how many of the earlier tensors
    still exist when the next one is made."""
    made = []
    for i in range(num):
        alive.append(sum(reference() is not None for reference in made))
        tensor = torch.full((size,), float(i))
        made.append(weakref.ref(tensor))
        yield f"t{i}", tensor
        del tensor


def test_publishing_holds_one_tensor_at_a_time(files: VersionFiles) -> None:
    alive: list[int] = []
    shapes = {f"t{i}": (1000,) for i in range(8)}
    whole = WholeTensors(shapes, made(8, 1000, alive), torch.bfloat16)
    found = safetensors.torch.load_file(publish(whole, 0, files))
    assert alive == [0] * 8
    assert [found[f"t{i}"][0].item() for i in range(8)] == list(range(8))


def test_tensors_are_passed_on_once_written(
    files: VersionFiles,
) -> None:
    shapes = {f"t{i}": (4,) for i in range(3)}
    stream = written(WholeTensors(shapes, made(3, 4, []), torch.float32), 0, files)
    given = [(name, tensor[0].item()) for name, tensor in islice(stream, 3)]
    assert given == [("t0", 0.0), ("t1", 1.0), ("t2", 2.0)]
    assert not files.has(0)
    assert next(stream, None) is None
    assert safetensors.torch.load_file(files.path(0))["t2"][0].item() == 2.0


@pytest.mark.parametrize("num", [7, 9])
def test_a_tensor_too_few_or_too_many_is_no_file(files: VersionFiles, num: int) -> None:
    shapes = {f"t{i}": (4,) for i in range(8)}
    with pytest.raises(AssertionError, match=r"nothing for t7|more tensors than"):
        publish(WholeTensors(shapes, made(num, 4, []), torch.float32), 0, files)
    assert not files.has(0)
    assert not list(files.path(0).parent.iterdir())
