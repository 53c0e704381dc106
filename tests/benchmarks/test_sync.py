"""Copies of weights, counted as the bench `sync` counts them."""

import torch
from safetensors import safe_open

from refrain.benchmarks.copies import CopiedBytes
from refrain.engines.learn.publishing import WholeTensors, publish
from refrain.engines.weights_file import VersionFiles


def whole(dtype: torch.dtype) -> WholeTensors:
    tensors = [(f"t{i}", torch.ones(100, 10)) for i in range(3)]
    return WholeTensors({name: (100, 10) for name, _ in tensors}, tensors, dtype)


def test_writing_is_one_copy_and_reading_one_more():
    files = VersionFiles(2)
    for dtype in (torch.float32, torch.bfloat16):
        model = 3 * 1000 * dtype.itemsize
        with CopiedBytes() as written:
            path = publish(whole(dtype), 0, files)
        assert (written.from_file, written.others) == (0, model)
        place = torch.empty(100, 10, dtype=dtype)
        with CopiedBytes(str(path)) as copied, safe_open(path, framework="pt") as tensors:
            for i in range(3):
                place.copy_(tensors.get_tensor(f"t{i}"))
            place.clone()
            torch.empty(5, device="meta").copy_(torch.ones(5))
        assert (copied.from_file, copied.others) == (model, place.nbytes)
    files.delete()
