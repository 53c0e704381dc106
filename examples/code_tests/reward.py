"""A reward for code: the last Python block of a response against its tests.

`ground_truth` is a JSON list of `{"input": .., "output": ..}`: standard input, and what is expected
on standard output. The score is 1 when all pass; the share that pass is a part of the record. Each
program is a process of its own; limits of memory and files are the config's
(`reward.max_memory_bytes`), and hold for what is started here.
"""

import json
import re
import subprocess
import sys
import tempfile

BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
MAX_OUTPUT_CHARACTERS = 100_000


def compute_score(data_source, solution_str, ground_truth, extra_info=None, seconds_per_test=4.0):
    """1.0 when every test passes."""
    blocks = BLOCK.findall(solution_str)
    if not blocks:
        return {"score": 0.0, "passed": 0.0, "has_code": False}
    tests = json.loads(ground_truth)
    passed = sum(passes(blocks[-1], test, seconds_per_test) for test in tests)
    return {
        "score": float(passed == len(tests)),
        "passed": passed / len(tests),
        "has_code": True,
    }


def passes(code, test, seconds):
    """Whether the program prints what is expected, in time and in an empty directory."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", code],
                input=test["input"],
                capture_output=True,
                text=True,
                timeout=seconds,
                cwd=directory,
                env={},
            )
        except (subprocess.TimeoutExpired, UnicodeDecodeError):
            return False
    output = done.stdout[:MAX_OUTPUT_CHARACTERS]
    return done.returncode == 0 and output.split() == test["output"].split()
