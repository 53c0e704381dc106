"""Return the memory of a CPU tensor to the system while the tensor stays."""

import ctypes
import os
from mmap import MADV_DONTNEED, PAGESIZE

from torch import Tensor


def release_pages(tensor: Tensor) -> None:
    """Return the whole memory pages of a tensor's storage. No other process may have mapped them.

    The pages then read as zero. A write allocates a page again. Raise OSError if the system
    refuses.
    """
    storage = tensor.untyped_storage()
    first = -(-storage.data_ptr() // PAGESIZE) * PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // PAGESIZE * PAGESIZE
    if end <= first:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_DONTNEED):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
