"""One step's requests with the model's first weights: what benches with real engines begin with."""

from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from engines.inference.profiling.engine import vllm_version
from engines.learn.learner import Learner
from schemas.config import TrainConfig
from schemas.data import Prompt
from schemas.keys import sample_key
from schemas.rollout import RequestId, RolloutRequest, Split
from schemas.weights import PolicyWeights
from tasks.run.preflight import read_inputs

_NUM_CANARIES = 4


def add_arguments(parser: ArgumentParser, config: str) -> None:
    """CONFIG, with this default, --prompts and --laps."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        type=Path,
        default=Path(config),
        help=f"[default: {config}]",
    )
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="[default: 32]")
    parser.add_argument("--laps", type=int, default=3, metavar="N", help="of each [default: 3]")


def first_prompts(config: TrainConfig, num_prompts: int) -> Sequence[Prompt]:
    """First prompts of the training data."""
    return read_inputs(config).datasets[Split.TRAIN].prompts[:num_prompts]


def first_weights(config: TrainConfig, prompts: Sequence[Prompt]) -> PolicyWeights:
    """Weights of version 0, with canaries."""
    learner = Learner(config)
    learner.restore(None)
    canaries = learner.canaries([prompt.token_ids for prompt in prompts[:_NUM_CANARIES]])
    return PolicyWeights(0, learner.weights_buffer(), canaries)


def step_requests(config: TrainConfig, prompts: Sequence[Prompt]) -> list[RolloutRequest]:
    """A group of each prompt."""
    return [
        RolloutRequest(
            id=RequestId(Split.TRAIN, 1, prompt.key, i),
            prompt_token_ids=prompt.token_ids,
            sample_key=sample_key(config.seed, 1, Split.TRAIN, prompt.key, i),
            max_response_tokens=config.data.max_response_tokens,
        )
        for prompt in prompts
        for i in range(config.rollout.group_size)
    ]


def engine_versions() -> dict[str, str]:
    return {name: version(name) for name in ("refrain", "torch", "ray")} | {"vllm": vllm_version()}
