"""Query the CUDA driver and print its answers as JSON.

This runs in its own process with the standard library only, because a broken driver can hang the
process that queries it.
"""

import ctypes
import json


def ask_driver() -> dict[str, object]:
    """Return the driver's answers as fields of `schemas.machine.CudaInfo`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"library": False}
    version, num_gpus = ctypes.c_int(0), ctypes.c_int(0)
    code = driver.cuInit(0)
    if code == 0:
        code = driver.cuDeviceGetCount(ctypes.byref(num_gpus))
    # The version is known without a device.
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
