"""Prompts that are in several rows or files: what a run refuses, and what it warns of."""

import json
from pathlib import Path

import pytest

from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import Split
from refrain.tasks.run.preflight import read_inputs

MODEL = Path("infra/demo/model")


def write(path: Path, *rows: tuple[str, str, str]) -> Path:
    """Write a file with rows of (data source, question, ground truth)."""
    lines = [
        json.dumps(
            {
                "data_source": source,
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"ground_truth": truth},
                "extra_info": {"file": path.name},
            }
        )
        for source, question, truth in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def config_of(train: Path, validation: Path) -> TrainConfig:
    values = {
        "model": {"path": MODEL, "dtype": "float32"},
        "data": {
            "train": [train],
            "validation": [validation],
            "max_prompt_tokens": 64,
            "max_response_tokens": 64,
        },
    }
    return TrainConfig.model_validate(values)


def test_a_truth_is_never_taken_from_the_other_file(tmp_path: Path) -> None:
    """The files disagree about the ground truth of one prompt, so the run is refused."""
    train = write(tmp_path / "train.jsonl", ("openai/gsm8k", "1 + 1", "2"))
    held_out = write(tmp_path / "held_out.jsonl", ("openai/gsm8k", "1 + 1", "777"))
    with pytest.raises(ValueError, match=r"train.jsonl row 1 and .*held_out.jsonl row 1.*'777'"):
        read_inputs(config_of(train, held_out))


def test_prompts_in_both_files_are_reported_once(tmp_path: Path) -> None:
    row = ("openai/gsm8k", "1 + 1", "2")
    train = write(tmp_path / "train.jsonl", row, ("openai/gsm8k", "1 + 2", "3"), row)
    other = ("openai/gsm8k", "2 + 2", "4")
    held_out = write(tmp_path / "held_out.jsonl", other, ("lighteval/MATH", "1 + 1", "2"))
    inputs = read_inputs(config_of(train, held_out))
    assert inputs.warnings == (
        "train: 1 repeated prompts left out",
        f"1 of 2 validation prompts are trained on, the first is {train} row 1 and {held_out} "
        "row 2: the validation is not fully held out",
    )
    # Each split keeps its own row of the shared prompt for the scorer.
    (shared,) = inputs.prompts_of(Split.TRAIN).keys() & inputs.prompts_of(Split.VALIDATION).keys()
    for split, source, file in (
        (Split.TRAIN, "openai/gsm8k", "train.jsonl"),
        (Split.VALIDATION, "lighteval/MATH", "held_out.jsonl"),
    ):
        prompt = inputs.prompts_of(split)[shared]
        assert (prompt.data_source, prompt.extra_info) == (source, {"file": file})
    assert read_inputs(config_of(train, write(tmp_path / "apart.jsonl", other))).warnings == (
        "train: 1 repeated prompts left out",
    )
