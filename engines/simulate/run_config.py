"""A run's config for a virtual cluster, so that its techniques are put together as there."""

from typing import Any

from schemas.config import TrainConfig

PROMPT_TOKENS = 4096
"""Tokens of the longest prompt of any trace, and more: none is refused for it."""


def run_config(max_response_tokens: int, **sections: Any) -> TrainConfig:
    """`sections`: those of the config that say something of the setting."""
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
