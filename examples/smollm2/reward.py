"""The last number of a response, scored by the set of reasoning-gym that made the question.

A model of 135M parameters never writes the tags that the questions ask for, so refrain's own
scorer would give it 0 for everything, and there would be nothing to learn from.
"""

import json
import re
from functools import cache

from reasoning_gym import get_score_answer_fn

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
scorer_of = cache(get_score_answer_fn)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return 1 for a right answer, 0 for others; some sets would give those a part of 1."""
    entry = json.loads(ground_truth)
    numbers = NUMBER.findall(solution_str)
    answer = numbers[-1] if numbers else None
    score = scorer_of(data_source.removeprefix("reasoning_gym/"))(answer, entry)
    return {"score": score if score == 1 else 0.0, "pred": answer}
