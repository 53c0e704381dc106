"""Memory of a tensor on a CPU, given back while the tensor stays."""

import ctypes
import os
from mmap import MADV_DONTNEED, PAGESIZE

from torch import Tensor


def release_pages(tensor: Tensor) -> None:
    """Give back the whole pages of a tensor's storage, which nobody else has mapped: they read as
    zero, and are taken again one by one when they are written to. Raises OSError."""
    storage = tensor.untyped_storage()
    first = -(-storage.data_ptr() // PAGESIZE) * PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // PAGESIZE * PAGESIZE
    if end <= first:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_DONTNEED):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
