"""What all tests share: one Ray cluster, the demo's model and data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from flows.environment import quieten

# A busy machine is no failure.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

REPOSITORY = Path(__file__).parent.parent
DEMO = REPOSITORY / "infra" / "demo"

quieten()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray
    ray.shutdown()
