"""Read the sources of a mixture into one data set."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from refrain.engines.data.dataset import Dataset
from refrain.engines.data.mixture import Portion
from refrain.engines.data.repeats import RowName, Samples, contradiction, refuse
from refrain.schemas.data import Prompt
from refrain.schemas.inputs import DataSource
from refrain.schemas.step import PromptGroup


def load_sources(sources: Sequence[DataSource], load: Callable[[DataSource], Dataset]) -> Dataset:
    """Return the prompts of all sources, each with the name of its source. `load` reads one.

    A prompt that several sources have stays with the first. Raises ValueError as `load` does, and
    when sources disagree about a prompt.
    """
    samples, rows, contradictions = Samples(), list[RowName](), list[str]()
    num_duplicates = num_overlong = 0
    where: dict[str, RowName] = {}
    for source in sources:
        dataset = load(source)
        num_duplicates += dataset.num_duplicates
        num_overlong += dataset.num_overlong
        taken = slice(source.max_prompts)
        for prompt, row in zip(dataset.prompts[taken], dataset.rows[taken], strict=True):
            first = samples.find(prompt)
            if first is None:
                where[samples.add(replace(prompt, source=source.name)).key] = row
                rows.append(row)
                continue
            num_duplicates += 1
            if what := contradiction(first, prompt):
                contradictions.append(f"{where[first.key]} and {row}: {what}")
    refuse(contradictions)
    return Dataset(tuple(samples.prompts.values()), tuple(rows), num_duplicates, num_overlong)


def with_sources(
    groups: Sequence[PromptGroup], prompts: Mapping[str, Prompt]
) -> tuple[PromptGroup, ...]:
    """Return the groups of a plan with the sources of their prompts."""
    named = {group.prompt_key: prompts[group.prompt_key].source for group in groups}
    return tuple(group.model_copy(update={"source": named[group.prompt_key]}) for group in groups)


def portions_of(sources: Sequence[DataSource], dataset: Dataset) -> list[Portion]:
    """Return the prompts of each source with its weight. Raises ValueError for a source without
    prompts of its own."""
    keys: dict[str, list[str]] = {source.name: [] for source in sources}
    for prompt in dataset.prompts:
        keys[prompt.source].append(prompt.key)
    for name, own in keys.items():
        if not own:
            raise ValueError(
                f"source {name!r} of data.train has no prompts that earlier sources lack: remove it"
            )
    return [Portion(one.name, tuple(keys[one.name]), one.weight) for one in sources]
