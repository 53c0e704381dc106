"""The learning rate of each update, against torch's own schedulers."""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from refrain.engines.learn.schedule import learning_rate_share
from refrain.schemas.trainer import TrainerConfig

NUM = 14


def course(**given: object) -> list[float]:
    config = TrainerConfig.model_validate({"learning_rate": 1e-2, **given})
    return [1e-2 * learning_rate_share(done, config) for done in range(NUM)]


def torchs(make: type[LRScheduler], **given: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-2)
    scheduler, rates = make(optimizer, **given), []
    for _ in range(NUM):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_without_a_decay_it_stays() -> None:
    assert course() == [1e-2] * NUM
    assert course(warmup_steps=4) == pytest.approx([0.25e-2, 0.5e-2, 0.75e-2, *[1e-2] * 11])


def test_in_a_line() -> None:
    given = {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 10}
    found = course(decay="linear", decay_steps=10, min_learning_rate=1e-3)
    assert found == pytest.approx(torchs(LinearLR, **given))


def test_along_half_a_cosine_and_then_it_stays() -> None:
    found = course(decay="cosine", decay_steps=10, min_learning_rate=1e-3)
    assert found[:11] == pytest.approx(torchs(CosineAnnealingLR, T_max=10, eta_min=1e-3)[:11])
    assert found[10:] == pytest.approx([1e-3] * 4)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_decay_begins_after_the_warm_up(decay: str) -> None:
    plain = course(decay=decay, decay_steps=10)
    warm = course(decay=decay, decay_steps=10, warmup_steps=3)
    assert warm[3:] == pytest.approx(plain[: NUM - 3])
    assert plain[-1] == 0.0
