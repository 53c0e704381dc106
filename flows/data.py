"""Convert data sets to files for `data.train` and `data.validation`."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from refrain.engines.answers.builtin import builtin_scorer
from refrain.engines.data.convert import (
    PUBLIC,
    Columns,
    Converted,
    PublicSet,
    Row,
    convert_rows,
    stated_answer,
    take_over,
)
from refrain.engines.data.dataset import read_rows
from refrain.engines.data.hub import hub_rows, is_hub_name
from refrain.engines.paths import check_place
from refrain.flows.output_file import PARQUET, check_output, making, writing

Convert = Callable[[Mapping[str, Any], str, int], Row]


REASONING_GYM = "reasoning-gym"
SIZE, HELD_OUT, SEED = 1000, 100, 0


def launch_data(
    name: str,
    sets: tuple[str, ...],
    files: tuple[Path, ...],
    out: Path | None,
    revision: str | None,
    question: str | None,
    answer: str | None,
    data_source: str | None,
    instruction: str,
    size: int | None,
    held_out: int | None,
    seed: int | None,
    difficulty: Sequence[int] | None,
    overwrite: bool,
    split: tuple[str, ...] = (),
    subset: str | None = None,
) -> None:
    """Convert a data set of the Hub or files, or generate questions. Raise ValueError for bad
    input."""
    made = (size, held_out, seed, difficulty)
    columns = (question, answer, data_source)
    if name == REASONING_GYM:
        if files or revision or any(columns) or instruction or split or subset:
            raise ValueError(
                f"{name} generates questions and scores them itself: leave out --from, --revision, "
                "--prompt, --answer, --data-source, --instruction, --split and --subset"
            )
        names = [word for text in sets for word in text.split(",") if word]
        numbers = (
            usual if given is None else given
            for given, usual in ((size, SIZE), (held_out, HELD_OUT), (seed, SEED))
        )
        _make_puzzles(names, out, *numbers, difficulty or (), overwrite)
        return
    if sets or any(one is not None for one in made):
        raise ValueError(
            f"SET, --size, --held-out, --seed and --difficulty work with {REASONING_GYM} only, "
            f"for example refrain data {REASONING_GYM} chain_sum --size 1000"
        )
    public, own = PUBLIC.get(name), Path(name).is_file()
    if public and (any(columns) or split or subset):
        raise ValueError(
            f"leave out --prompt, --answer, --data-source, --split and --subset: {name} needs none"
        )
    if own and (split or subset or revision):
        raise ValueError(f"leave out --split, --subset and --revision: {name} is a file")
    convert = public.convert if public else _own(name, own, *columns, instruction)
    if not public and not own:
        public = _on_the_hub(name, split, subset, convert)
    sources = {Path(file).stem: file for file in ((Path(name),) if own else files)}
    directory = out or Path("data") / _short(name)
    splits = tuple(sources) or (public.splits if public else ())
    given = [source for source in sources.values() if source.exists()]
    check_place(directory, f"--out {directory}")
    _refuse_used(directory, splits, given, overwrite)
    converted = {one: _rows(public, convert, one, sources, revision) for one in splits}
    _write_all(converted, directory, sources, name)


def _write_all(
    converted: Mapping[str, Converted], directory: Path, sources: Mapping[str, Path], name: str
) -> None:
    """Write each split to a file. Raise ValueError for a split without rows."""
    for split, found in converted.items():
        if not found.rows:
            raise ValueError(f"{sources.get(split, name)} has no rows for {split}: use another")
    written = [_write(found, _file(directory, split)) for split, found in converted.items()]
    _note_scorer(converted.values())
    print(f"next: refrain train CONFIG 'data.train=[{written[0]}]' --check")


def _make_puzzles(
    names: Sequence[str],
    out: Path | None,
    size: int,
    held_out: int,
    seed: int,
    levels: Sequence[int],
    overwrite: bool,
) -> None:
    from refrain.engines.data.puzzles import check_sets, puzzle_rows

    if not names:
        raise ValueError(f"give a SET, for example refrain data {REASONING_GYM} chain_sum")
    check_sets(names, levels)
    directory = out or Path("data") / REASONING_GYM
    check_place(directory, f"--out {directory}")
    sizes = {"train": size} | ({"validation": held_out} if held_out else {})
    _refuse_used(directory, tuple(sizes), (), overwrite)
    used: set[str] = set()
    # Held-out questions use another seed, so that a longer training set begins with the same rows.
    made = {
        split: puzzle_rows(names, levels, number, seed + place, split, used)
        for place, (split, number) in enumerate(sizes.items())
    }
    paths = [
        _write(Converted(rows, 0), directory / f"{split}.parquet") for split, rows in made.items()
    ]
    settings = " ".join(f"'data.{split}=[{path}]'" for split, path in zip(made, paths, strict=True))
    print(f"next: refrain train CONFIG {settings} --check")


def _own(
    name: str,
    is_file: bool,
    question: str | None,
    answer: str | None,
    data_source: str | None,
    instruction: str,
) -> Convert:
    """Return the conversion of a user's rows. A set of the Hub is its own data source, if the user
    names no other."""
    source = data_source or ("" if is_file else _short(name))
    if question and answer and source:
        return Columns(question, answer, source, instruction, stated_answer).convert
    if question or answer or data_source:
        wanted = "--prompt, --answer and --data-source" if is_file else "--prompt and --answer"
        raise ValueError(f"give all of {wanted}, or none of them if the rows are veRL's already")
    return take_over


def _short(name: str) -> str:
    """Return the name of a set, without the place of a local one."""
    path = Path(name)
    return path.stem if path.is_file() else path.name if path.is_dir() else name


def _on_the_hub(
    name: str, splits: tuple[str, ...], subset: str | None, convert: Convert
) -> PublicSet:
    """Return the set of the Hub, or of a local directory, with this name. Raise ValueError for
    another name."""
    path = Path(name)
    if not (is_hub_name(name) or (path.name and path.is_dir())):
        raise ValueError(
            f"{name} is neither a file nor one of {', '.join(PUBLIC)}: give one of these names, a "
            "Parquet, JSON or JSONL file, or OWNER/NAME of a data set on the Hub"
        )
    return PublicSet(name, splits or ("train",), convert, subset)


def _note_scorer(converted: Iterable[Converted]) -> None:
    """Print which rows need a scorer of the user's."""
    for source in sorted({row["data_source"] for found in converted for row in found.rows}):
        try:
            builtin_scorer(source)
        except ValueError:
            print(
                f"no built-in scorer for {source}: score with reward.type: function, or name one "
                "with --data-source, for example math_dapo"
            )


def _file(directory: Path, split: str) -> Path:
    """Return the file of a split, also of a slice such as `train[:100]`."""
    return directory / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', split).strip('-')}.parquet"


def _rows(
    public: PublicSet | None,
    convert: Convert,
    split: str,
    sources: Mapping[str, Path],
    revision: str | None,
) -> Converted:
    if split in sources:
        rows = read_rows(sources[split], all_columns=True)
    else:
        assert public
        rows = hub_rows(public.repository, public.subset, split, revision)
    return convert_rows(rows, convert, split)


def _refuse_used(
    directory: Path, splits: tuple[str, ...], sources: Iterable[Path], overwrite: bool
) -> None:
    for split in splits:
        path = _file(directory, split)
        if path.exists() and not overwrite:
            raise ValueError(
                f"{path} exists already: give --overwrite to replace it, or another --out"
            )
        if any(path.exists() and path.samefile(source) for source in sources):
            raise ValueError(f"{path} is an input file: give another directory with --out")
        if directory.is_dir():
            check_output(path, PARQUET)


def _write(converted: Converted, path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with making(path.parent), writing(path) as unfinished:
        pq.write_table(pa.Table.from_pylist(converted.rows), unfinished)
    repeated = f", {converted.num_repeated:,} repeated ones left out" * (converted.num_repeated > 0)
    first = converted.rows[0]
    print(f"{path}: {len(converted.rows):,} prompts{repeated}")
    print(f"  first: {first['prompt'][-1]['content'][:120]!r}")
    print(f"  right: {first['reward_model']['ground_truth']!r} by {first['data_source']}")
    return path
