"""Make the config of a run for a virtual cluster, so that techniques are combined as in a run."""

from typing import Any

from refrain.schemas.config import TrainConfig

PROMPT_TOKENS = 4096
"""Prompt limit of the config. It is larger than any trace's prompts, so that none is refused."""


def run_config(max_response_tokens: int, **sections: Any) -> TrainConfig:
    """Return the config of a simulated run. `sections`: config sections that differ from the
    defaults."""
    given = {
        "model": {"path": "of-the-trace"},
        "data": {
            "train": ["of-the-trace"],
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_response_tokens": max_response_tokens,
        },
        "trainer": {"micro_batch_tokens": PROMPT_TOKENS + max_response_tokens},
    }
    return TrainConfig.model_validate(given | sections)
