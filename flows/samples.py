"""`refrain samples`: look at a run's rollouts, in the terminal or in a browser."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from refrain.engines.data.tokenizer import TokenDecoder
from refrain.engines.reports.samples import print_sample, print_samples
from refrain.engines.store.reader import answer, answers, fetch_rows
from refrain.engines.store.samples import Page, SampleFilter, find, search
from refrain.engines.user_files import read_json_object
from refrain.tasks.run.find import CONFIG_FILE, STORE_FILE, find_run


class Decoder(Protocol):
    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]: ...

    def pieces(self, ids: Sequence[int]) -> list[str]: ...


class TokenNumbers:
    """Token ids in place of text, for a run whose tokenizer is gone."""

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        return ["".join(self.pieces(ids)) for ids in responses]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [f"<{id}>" for id in ids]


class RunSamples:
    """The rollouts of one run, live or ended."""

    def __init__(self, run_dir: Path, timeout_s: float) -> None:
        self._path = (run_dir / STORE_FILE).absolute()
        self._ask = partial(answer, self._path, timeout_s=timeout_s)
        self.name = run_dir.name
        self.timeout_s = timeout_s
        self.decoder, self.warning = open_decoder(run_dir)

    def page(self, wanted: SampleFilter, grep: str, limit: int, offset: int = 0) -> Page:
        """Return one page of samples. `grep`: a text that their responses contain."""
        if not grep:
            with answers(self._path, self.timeout_s, fetch_rows) as read:
                return find(read, wanted, limit, offset)

        def contains(responses: list[list[int]]) -> list[bool]:
            return [grep in text for text in self.decoder.decode(responses)]

        return search(self._ask, wanted, contains, limit, offset, self.timeout_s)


def launch_samples(
    run: str,
    runs_dir: Path,
    *,
    grep: str,
    limit: int,
    timeout_s: float,
    colour: str,
    port: int | None,
    **wanted: Any,
) -> None:
    """Print samples, or serve pages about them. Raise ValueError when there is no such run or no
    such sample."""
    samples = RunSamples(find_run(run, runs_dir), timeout_s)
    if samples.warning:
        print(samples.warning, file=sys.stderr)
    if port is not None:
        from refrain.flows.samples_server import serve_samples

        serve_samples(samples, port)
        return
    console = Console(highlight=False, markup=False)
    conditions = SampleFilter(**wanted)
    page = samples.page(conditions, grep, limit)
    if conditions.sample is not None and not page.samples:
        raise ValueError(
            f"{samples.name} has no such sample: `refrain samples {run}` lists steps, prompts and "
            "samples"
        )
    if conditions.sample is not None and len(page.samples) == 1:
        print_sample(page.samples[0], samples.decoder.pieces, colour, console)
    else:
        print_samples(page, samples.decoder.pieces, colour, console)


def open_decoder(run_dir: Path) -> tuple[Decoder, str]:
    """Return the decoder of a run's tokens. Without its tokenizer, return a decoder to token ids
    and a warning."""
    model = read_json_object(run_dir / CONFIG_FILE).get("model")
    try:
        return TokenDecoder(Path(model["path"] if model else "")), ""
    except ValueError as error:
        return TokenNumbers(), f"token ids replace the text: {error}"
