"""The array of running texts agrees with the requests, whichever end."""

import random
from types import SimpleNamespace

import numpy as np

from engines.inference.drafting.texts import Texts


def request_of(*prompt: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_prompt_tokens=len(prompt), prompt_token_ids=[*prompt], _all_token_ids=[*prompt]
    )


def test_rows_are_the_texts_of_the_running_requests() -> None:
    rng, texts, running = random.Random(0), Texts(8, 64), {}
    for step in range(300):
        if len(running) < 8 and rng.random() < 0.4:
            one = request_of(*[rng.randrange(9) for _ in range(rng.randrange(1, 5))])
            running[f"r{step}"] = one
            texts.begin(f"r{step}", one)
        for id in list(running):
            added = rng.randrange(4)
            running[id]._all_token_ids += [rng.randrange(9) for _ in range(added)]
            assert texts.grow(id) == bool(added)
            if len(running[id]._all_token_ids) > 50 or rng.random() < 0.05:
                texts.end(id)
                del running[id]
        assert set(texts.ids) == set(running)
        lengths = texts.lengths([*texts.ids, "unknown"])
        for row, id in enumerate(texts.ids):
            assert texts.tokens[row, : lengths[row]].tolist() == running[id]._all_token_ids
        assert lengths[-1] == 0
        assert not any(texts.grow(id) for id in texts.ids)


def test_drafts_are_right_up_to_the_first_other_token() -> None:
    texts = Texts(3, 8)
    for name, tokens in (("a", [1, 2, 3, 4]), ("b", [5, 6, 7, 8])):
        one = request_of(*tokens[:1])
        texts.begin(name, one)
        one._all_token_ids = tokens
        texts.grow(name)
    drafts = np.array([[3, 4, 9], [6, 0, 8], [2, 3, 4]], np.int32)
    num = np.array([3, 3, 2], np.int32)
    starts = np.array([2, 1, 1], np.int32)
    assert texts.num_right(["a", "b", "a"], starts, drafts, num).tolist() == [2, 1, 2]
