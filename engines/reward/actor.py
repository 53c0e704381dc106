"""The process that decodes and scores responses."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from engines.reward.scorer import Response, Scorer
from schemas.data import Prompt
from schemas.reward import BuiltinReward, FunctionReward

MAX_PROCESSES = 8
MAX_ROWS_AT_ONCE = 64
"""Rows whose tokens are Python's at a time: they take ten times as much room there."""


class RewardActor:
    """A tokenizer and a scorer. It keeps nothing between calls, so a call may be repeated."""

    def __init__(
        self,
        tokenizer_path: Path,
        config: BuiltinReward | FunctionReward,
        num_processes: int | None = None,
    ) -> None:
        """`num_processes` run a user's function; by default one per core, at most 8."""
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)
        self._scorer = Scorer(config, num_processes or min(MAX_PROCESSES, os.cpu_count() or 1))

    def ready(self) -> None:
        """Answers once the tokenizer is loaded."""

    def score(self, rows: pa.Table, prompts: Mapping[str, Prompt]) -> pa.Table:
        """Rewards of rows with `prompt_key`, `sample_index` and `response_token_ids`.

        Returns `prompt_key`, `sample_index`, `reward` and `extra` (a JSON object) in the same
        order. Raises ValueError as `Scorer.score` does.
        """
        responses = [
            self._response(row, prompts[row["prompt_key"]])
            for batch in rows.to_batches(max_chunksize=MAX_ROWS_AT_ONCE)
            for row in batch.to_pylist()
        ]
        scored = self._scorer.score(responses)
        return pa.table(
            {
                "prompt_key": rows["prompt_key"],
                "sample_index": rows["sample_index"],
                "reward": pa.array([score for score, _ in scored], pa.float64()),
                "extra": pa.array([json.dumps(extra) for _, extra in scored], pa.string()),
            }
        )

    def _response(self, row: dict[str, Any], prompt: Prompt) -> Response:
        text = self._tokenizer.decode(row["response_token_ids"], skip_special_tokens=True)
        return Response(
            prompt_key=row["prompt_key"],
            sample_index=row["sample_index"],
            data_source=prompt.data_source,
            solution_str=text,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
        )
