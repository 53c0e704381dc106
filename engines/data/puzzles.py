"""Convert questions of reasoning-gym to veRL's rows. reasoning-gym generates the questions from a
seed and scores their answers."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from refrain.engines.answers.puzzles import INSTRUCTION, PREFIX, reasoning_gym, write_entry

MOST_TRIES = 20
"""Most questions drawn for each one kept, because small sets repeat questions."""


def check_sets(names: Sequence[str], levels: Sequence[int]) -> None:
    """Raise ValueError for unknown sets, or for sets without difficulty levels if `levels` are
    given."""
    factory = reasoning_gym().factory
    known = sorted(factory.DATASETS.keys() - {"composite"})
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"reasoning-gym has no set {', '.join(unknown)}: it has {', '.join(known)}"
        )
    if levels and (without := [name for name in names if name not in factory.CURRICULA]):
        raise ValueError(
            f"--difficulty: {', '.join(without)} has no difficulty levels: remove the option"
        )


def puzzle_rows(
    names: Sequence[str],
    levels: Sequence[int],
    num_rows: int,
    seed: int,
    split: str,
    used: set[str],
) -> list[dict[str, Any]]:
    """Return rows of the sets in turn, easier ones first. Skip questions in `used`, and add the
    new ones to it.

    `levels`: difficulty levels, from 0. Empty: the default mixture of each set. Raises ValueError
    when a set has too few questions.
    """
    kinds = list(product(levels or [None], names))
    share, more = divmod(num_rows, len(kinds))
    parts = [
        _rows(name, level, share + (place < more), seed, split, used)
        for place, (level, name) in enumerate(kinds)
    ]
    per_level = [parts[at : at + len(names)] for at in range(0, len(parts), len(names))]
    rows = [row for level in per_level for row in _in_turn(level)]
    for index, row in enumerate(rows):
        row["extra_info"]["index"] = index
    return rows


def _in_turn(parts: Sequence[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for place in range(max(map(len, parts), default=0)):
        yield from (part[place] for part in parts if place < len(part))


def _rows(
    name: str, level: int | None, num_rows: int, seed: int, split: str, used: set[str]
) -> list[dict[str, Any]]:
    score = reasoning_gym().get_score_answer_fn(name)
    dataset = _dataset(name, level, MOST_TRIES * num_rows, seed)
    rows: list[dict[str, Any]] = []
    for index in range(MOST_TRIES * num_rows):
        if len(rows) == num_rows:
            break
        entry = dataset[index]
        if entry["question"] not in used:
            used.add(entry["question"])
            rows.append(_row(name, level, entry, write_entry(entry, score), split))
    if len(rows) < num_rows:
        raise ValueError(
            f"{name} has only {len(rows)} further questions, but {num_rows} are needed: "
            "lower --size, or add sets or --difficulty"
        )
    return rows


def _dataset(name: str, level: int | None, size: int, seed: int) -> Any:
    if level is None:
        return reasoning_gym().create_dataset(name, size=size, seed=seed)
    factory = reasoning_gym().factory
    curriculum = factory.create_curriculum(name)
    curriculum.set_global_level(level)
    config = curriculum.generate_configuration({"size": size, "seed": seed})
    kind, _ = factory.DATASETS[name]
    return kind(config)


def _row(
    name: str, level: int | None, entry: dict[str, Any], ground_truth: str, split: str
) -> dict[str, Any]:
    info = {"split": split} | ({} if level is None else {"difficulty": level})
    return {
        "data_source": PREFIX + name,
        "prompt": [{"role": "user", "content": f"{entry['question'].strip()}\n\n{INSTRUCTION}"}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": info,
    }
