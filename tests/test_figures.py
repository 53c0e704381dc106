"""Figures in the README and docs/ equal those of the committed baselines.

tests/figures/PAGE.md has the sentences and rows of a page, with expressions in place of figures.
For example, `{rollout.speedup_on_epoch_5:.2f}` is that figure of benchmarks/baselines/rollout.json.
The page must have each sentence, word for word. If one is stale, the failure prints the new text.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from string import Formatter
from types import SimpleNamespace
from typing import Any

import pytest

from refrain.engines.latency.analytic import AnalyticLatency
from refrain.engines.latency.hardware import H100
from refrain.engines.latency.model_shape import SHAPES
from tests.conftest import REPOSITORY

BASELINES = REPOSITORY / "benchmarks" / "baselines"
FOLDER = Path(__file__).parent / "figures"
TEMPLATES = sorted(FOLDER.rglob("*.md"))
CITES = re.compile(r"baselines/\w+\.json|refrain (bench|simulate --paper)|SIMULATED")
CUT = "\N{BULLET}"
QUOTED = re.compile(r"`[^`]*`|\]\([^)]*\)|\*\*\*|\(paper[^)]*\)")
"""Code, links and figures of the papers: these do not come from a baseline."""


class Figure(float):
    """A figure with two more formats: `100*.0f` scales it, `min` gives minutes and seconds."""

    def __format__(self, spec: str) -> str:
        if spec == "min":
            minutes, seconds = divmod(round(self), 60)
            return f"{minutes} min {seconds} s"
        factor, _, digits = spec.rpartition("*")
        scaled = float(self) * abs(float(factor or 1))
        return format(scaled, f"+{digits}" if factor.startswith("+") else digits)


class Expressions(Formatter):
    """Evaluates the expressions between braces."""

    def get_field(self, field_name: str, _: Any, kwargs: Any) -> tuple[Any, str]:
        value = eval(field_name, dict(kwargs))
        return Figure(value) if isinstance(value, int | float) else value, field_name


def rows_where(rows: list[SimpleNamespace], name: str, **where: Any) -> list[Any]:
    """Return the value `name` of each row that has it and matches `where`."""
    found = (vars(row) for row in rows)
    return [
        row[name]
        for row in found
        if name in row and all(key in row and row[key] == value for key, value in where.items())
    ]


def first(rows: list[SimpleNamespace], name: str, **where: Any) -> Any:
    return rows_where(rows, name, **where)[0]


def speedup(baseline: SimpleNamespace, drafter: str, epoch: int) -> float:
    """Return the rollout seconds of an epoch without drafts over those with this drafter."""
    return first(baseline.rows, "rollout_s", drafter="none", epoch=epoch) / first(
        baseline.rows, "rollout_s", drafter=drafter, epoch=epoch
    )


def verifying(shape: str, tp_degree: int, batch: int, num_drafts: int) -> float:
    """Return the seconds to verify over those to decode, on H100 with contexts of 4,000 tokens."""
    latency = AnalyticLatency(SHAPES[shape], H100)
    at = (tp_degree, batch, 4000 * batch)
    return latency.verify_s(*at, num_drafts) / latency.decode_s(*at)


def total(rows: list[SimpleNamespace], name: str, **where: Any) -> float:
    return sum(rows_where(rows, name, **where))


def names() -> dict[str, Any]:
    """Return the names for expressions: baselines by the names of their files, and functions."""
    found = {"mean": fmean, "median": median, "min": min, "max": max, "len": len}
    found |= {"of": rows_where, "first": first, "total": total, "speedup": speedup}
    found |= {"verifying": verifying}
    for file in BASELINES.glob("*.json"):
        baseline = json.loads(
            file.read_text(), object_hook=lambda fields: SimpleNamespace(**fields)
        )
        if hasattr(baseline, "figures"):
            baseline.figures.rows = baseline.rows
            found[file.stem] = baseline.figures
    return found


NAMES = names()


def page_of(template: Path) -> Path:
    folder = REPOSITORY if template.name == "README.md" else REPOSITORY / "docs"
    return folder / template.relative_to(FOLDER)


def expected(template: Path) -> list[str]:
    chunks = re.split(r"\n\s*\n|\n(?=\|)", template.read_text().strip())
    return [plain(Expressions().vformat(chunk, (), NAMES)) for chunk in chunks]


def plain(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.stem)
def test_figures_are_those_of_the_baselines(template: Path) -> None:
    page = plain(page_of(template).read_text())
    stale = [chunk for chunk in expected(template) if chunk not in page]
    assert not stale, f"{page_of(template)} should say:\n\n" + "\n\n".join(stale)


def citing(page: str) -> Iterator[str]:
    """Return the paragraphs, items and tables that give figures of a baseline. They name it or the
    command that makes it. A table directly after such a block counts too."""
    follows = False
    for block in re.split(r"\n\s*\n|\n(?=\* )", page):
        block = plain(block)
        is_table = block.startswith("|")
        cites = bool(CITES.search(block))
        if (cites and not block.startswith("```")) or (is_table and follows):
            yield block
        follows = cites or (follows and is_table)


def unnamed(page: str, chunks: list[str]) -> list[str]:
    """Return the stretches of text with figures that no template has."""
    found = []
    for left in citing(page):
        for chunk in chunks:
            left = left.replace(chunk, CUT)
        stretches = QUOTED.sub("", left).split(CUT)
        found += [stretch.strip() for stretch in stretches if re.search(r"\d", stretch)]
    return found


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.stem)
def test_no_figure_is_left_out(template: Path) -> None:
    found = unnamed(page_of(template).read_text(), expected(template))
    assert not found, f"{template} has none of:\n" + "\n".join(found)


def test_every_page_with_figures_is_looked_at() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    # The page of settings is generated from their descriptions.
    named = {page_of(template) for template in TEMPLATES} | {
        pages[0].parent / "docs" / "configuration.md"
    }
    assert [page for page in pages if page not in named and unnamed(page.read_text(), [])] == []


def test_a_figure_that_has_changed_or_is_new_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    template = FOLDER / "results.md"
    page = page_of(template).read_text()
    new = "| a row | 1.5 | measured | `refrain bench sql` |\n| the demo's start"
    assert any("1.5" in text for text in unnamed(page.replace("| the demo's start", new), []))
    monkeypatch.setattr(NAMES["sql"], "slowdown", 1.5)
    (stale,) = [chunk for chunk in expected(template) if chunk not in plain(page)]
    assert "`refrain sql`" in stale
    assert stale.endswith("; 1.500 |")
