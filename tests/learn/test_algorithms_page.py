"""The pages about algorithms agree with the code; each metric of the trainer is described."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from refrain.schemas.algorithm import SETTINGS, AlgorithmConfig
from refrain.schemas.config import TrainConfig
from tests.accounting.test_metric_names import NAMES, OF_TRAINER, described_as
from tests.conftest import REPOSITORY
from tests.learn.conftest import make_batch
from tests.learn.test_mixed_versions import started

PAGE = (REPOSITORY / "docs" / "algorithms.md").read_text()
TYPES = (REPOSITORY / "docs" / "algorithm_types.md").read_text()
CODE = re.compile(r"`([^`]+)`")


def table(first: str) -> list[list[str]]:
    """Return the cells of each row of the table whose first column is `first`, header included."""
    lines = PAGE[PAGE.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    return [rows[0], *rows[2:]]


def shown(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_types_row_has_its_settings(name: str) -> None:
    head, *rows = table("type")
    (row,) = [row for row in rows if row[0] == name]
    required = {"model": {"path": Path("m")}, "data": {"train": ["d"]}}
    config = TrainConfig.model_validate(required | {"algorithm": {"type": name}})
    for column, cell in zip(head[1:], row[1:], strict=True):
        value = getattr(config.algorithm, column, config.num_minibatches)
        same = float(cell) == value if isinstance(value, float) else cell == shown(value)
        assert same, f"{name}: {column} is {value}"


def test_table_lists_the_settings_of_types() -> None:
    head, *rows = table("type")
    assert [row[0] for row in rows] == list(SETTINGS)
    assert set().union(*SETTINGS.values()) <= set(head)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_type_has_a_section_with_its_paper_and_its_peers(name: str) -> None:
    section = TYPES.split(f"## {name}\n")[1].split("\n#")[0]
    papers = re.findall(r"arXiv:[\d.]+\d", section)
    assert any(paper in (AlgorithmConfig.__doc__ or "") for paper in papers)
    assert "veRL" in section


def test_page_names_exactly_the_settings() -> None:
    head, *_ = table("type")
    of_any = [CODE.findall(row[0])[0] for row in table("setting")[1:]]
    derived = {"minibatches", "policy_loss", "baseline"}
    assert {*head[1:], *of_any} - derived == AlgorithmConfig.model_fields.keys() - {"type"}


def test_every_metric_of_a_step_is_described(
    make_config: Callable[..., TrainConfig], model_dir: Path
) -> None:
    """No other trainer metric is described."""
    algorithm = {
        "type": "dapo",
        "overlong_filtering": True,
        "kl_coefficient": 0.1,
        "reward_kl_coefficient": 0.1,
        "tis_cap": 2.0,
        "dual_clip": 3.0,
    }
    learner = started(make_config(algorithm), staleness=1)
    taught = started(make_config({"teacher": model_dir}))
    told = learner.train_step(make_batch()).keys() | taught.train_step(make_batch()).keys()
    # The trainer reports the first when it publishes adapters, the others for mixtures
    # (`test_routing_replay`).
    others = {"actor/lora_arrived", "routing/replayed_share", "routing/changed_share"}
    described = {name for name in NAMES if name.startswith(OF_TRAINER)} - others
    assert described == set(described_as(told).values())
