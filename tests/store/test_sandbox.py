"""A query's process limits its own memory, files and time."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

LIMITED = """
import sys, time
from pathlib import Path
from refrain.engines.store import sandbox

sandbox.MEMORY_BYTES = 2**28
sandbox.limit_process(1.0)
try:
    {does}
except (MemoryError, OSError) as error:
    sys.exit(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        ("bytearray(2**29)", 1, "MemoryError"),
        ("Path('FILE').write_text('x')", 1, "OSError"),
        ("sys.exit(Path('/proc/self/oom_score_adj').read_text())", 1, "1000"),
        ("time.sleep(20)", -signal.SIGALRM, ""),
    ],
)
def test_query_keeps_to_its_limits(tmp_path: Path, does: str, code: int, said: str) -> None:
    program = LIMITED.format(does=does.replace("FILE", str(tmp_path / "file")))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30.0,
    )
    assert (done.returncode, done.stderr.strip()) == (code, said)
