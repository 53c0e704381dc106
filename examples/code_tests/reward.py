"""A reward for code: the last Python block of a response against its tests.

`ground_truth` is a JSON list of `{"input": .., "output": ..}`: standard input, and what is expected
on standard output. The score is 1 when all pass; the share that pass is a part of the record. Each
program runs in a sandbox ([sandbox.py](sandbox.py)). A machine that has none is refused.
"""

import json
import os
import re
import sys

from sandbox import run, what_is_missing

BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
ACCEPTED = "CODE_TESTS_WITHOUT_SANDBOX"
MISSING = what_is_missing()

if MISSING and os.environ.get(ACCEPTED) != "1":
    sys.exit(
        f"this machine cannot isolate programs that a model wrote ({MISSING}). Allow user "
        "namespaces, as examples/code_tests/README.md says. Or, where such programs can do no "
        f"harm, export {ACCEPTED}=1 and give reward.environment=[{ACCEPTED}]"
    )


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
    """Whether the program prints what is expected, in time."""
    printed = run(code, test["input"], seconds, isolated=not MISSING)
    return printed is not None and printed.split() == test["output"].split()
