from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EnvironmentTask:
    prompt_key: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: Any
    seed: int
