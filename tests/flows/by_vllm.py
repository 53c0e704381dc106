"""Run plain vLLM: python -m tests.flows.by_vllm MODEL < REQUESTS.json > ANSWERS.json"""

import json
import os
import sys
from typing import Any

NUM_TOKENS = 24
"""Length at which a greedy response is cut."""


def answers(model: str, prompts: list[list[int]], sequences: list[list[int]]) -> dict[str, Any]:
    """Return greedy responses to the prompts. Score the sequences: return the log-probabilities of
    their tokens from the second on."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        kv_cache_memory_bytes=2**27,
        enable_prefix_caching=False,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
    responses = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy)
    scored = llm.generate([{"prompt_token_ids": ids} for ids in sequences], scoring)
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in responses],
        "logprobs": [
            [found[id].logprob for id, found in zip(ids[1:], one.prompt_logprobs[1:], strict=True)]
            for ids, one in zip(sequences, scored, strict=True)
        ],
    }


if __name__ == "__main__":
    given, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries may print to stdout too.
    json.dump(answers(sys.argv[1], **given), out)
    out.close()
