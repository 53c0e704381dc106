"""The CUDA driver's answers, as JSON. A process of its own, with the standard library alone: a
driver that is broken holds up whoever asks it."""

import ctypes
import json


def ask_driver() -> dict[str, object]:
    """Fields of `schemas.machine.CudaSeen`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"library": False}
    version, num_gpus = ctypes.c_int(0), ctypes.c_int(0)
    code = driver.cuInit(0)
    if code == 0:
        code = driver.cuDeviceGetCount(ctypes.byref(num_gpus))
    # Needs no device.
    driver.cuDriverGetVersion(ctypes.byref(version))
    major, rest = divmod(version.value, 1000)
    return {
        "library": True,
        "code": code,
        "num_gpus": num_gpus.value,
        "cuda_version": [major, rest // 10] if version.value else None,
    }


if __name__ == "__main__":
    print(json.dumps(ask_driver()))
