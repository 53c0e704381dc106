"""Engines on vLLM's V2 runner generate the samples of those on V1, whatever the drafts.

Its kernels run in Triton's interpreter here.
"""

import json
from pathlib import Path

import pytest

from refrain.engines.inference.engine.process import prepare_process
from refrain.schemas.config import TrainConfig
from tests.inference.interpreted_env import run_cases
from tests.inference.real import CONFIG, requests
from tests.inference.v2_cases import NUM_PROMPTS, REFERENCE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="package")
async def test_with_asynchronous_scheduling(on_one_engine, prompts, tmp_path: Path):
    """Each step is scheduled while the one before runs, as on a GPU."""
    finished = [on_one_engine[request.id] for request in requests(prompts[:NUM_PROMPTS])]
    reference = tmp_path / "reference.json"
    reference.write_text(
        json.dumps(
            [
                {
                    "tokens": [int(token) for token in one.generated.token_ids],
                    "logprobs": [float(value) for value in one.generated.inference_logprobs],
                    "reason": one.finish_reason,
                }
                for one in finished
            ]
        )
    )
    run_cases("v2_cases", 400.0, asynchronous=True, **{REFERENCE: str(reference)})


def test_a_cpu_is_refused():
    with pytest.raises(RuntimeError, match="model_runner: v2 needs a GPU"):
        prepare_process(1, model_runner="v2")


@pytest.mark.parametrize(
    "specactor",
    [{"drafter": "ngram"}, {"draft_models": [{"name": "a", "path": "/a"}]}],
    ids=str,
)
def test_drafters_that_run_on_v1_alone_are_refused(specactor):
    given = CONFIG.model_dump(mode="json") | {"specactor": specactor}
    given["rollout"]["model_runner"] = "v2"
    with pytest.raises(ValueError, match="model_runner: v2 drafts from history and a head only"):
        TrainConfig.model_validate(given)
