"""Set the clock back by an hour while a file exists. Python loads this module from PYTHONPATH."""

import os
import time

_now = time.time
_file = os.environ.get("REFRAIN_CHAOS_CLOCK", "")


def _time() -> float:
    return _now() - (3600.0 if os.path.exists(_file) else 0.0)


if _file:
    time.time = _time
