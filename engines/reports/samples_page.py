"""Pages about a run's rollouts for a browser: a list, one response, one prompt over epochs. Pure.

    address ─► View ─► engines.store.samples ─► HTML

The pages have no script. Every text is escaped, and the browser may load nothing (`POLICY`).
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any
from urllib.parse import urlencode

from refrain.engines.reports.samples import (
    COLOURINGS,
    KEY_CHARACTERS,
    Pieces,
    counted,
    legend,
    properties,
    runs,
)
from refrain.engines.reports.tables import printable
from refrain.engines.store.samples import SORTS, Page, Sample, SampleFilter
from refrain.schemas.rollout import FinishReason, Split

PAGE_SIZE = 50
_MOST_PAGES = 1_000_000
_SHOWN_TOKENS = 200
"""Tokens of a prompt's end and of a response's beginning in a list."""
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5em; color: #1d2330; background: #fff }
h1 { font-size: 1.3em } h2 { font-size: 1em; margin: 1.4em 0 .2em }
form { display: flex; flex-wrap: wrap; gap: .6em; align-items: end; margin: 1em 0 }
label { display: grid; font-size: .85em; color: #556 } input, select { font: inherit }
input { width: 8em } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2em 0 }
pre span { unicode-bidi: isolate } .prompt { color: #778 } .rest { color: #778 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1em } dd { margin: 0 }
.epochs { display: flex; gap: 1em; overflow-x: auto } .epochs section { flex: 0 0 26em }
nav { margin: 1em 0 } nav a { margin-right: 1em } .wrong { color: #a00 }
.likely1 { background: #e2f2d8 } .likely2 { background: #fbf0b4 } .likely3 { background: #fbd5a0 }
.likely4 { background: #f6a9a0 } .version1 { background: #d5ecf7 } .version2 { background: #ecd9f5 }
.version3 { background: #fbf0b4 } .observed { color: #778; font-style: italic }
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; form-action 'self'; base-uri 'none'"
"""Content security policy: this style, no script, no request elsewhere."""


@dataclass(frozen=True, slots=True)
class View:
    """What the address of a page asks for."""

    wanted: SampleFilter
    grep: str = ""
    """Text that the responses contain."""
    colouring: str = COLOURINGS[0]
    number: int = 1
    """Number of the page, from 1 on."""

    @property
    def offset(self) -> int:
        return (self.number - 1) * PAGE_SIZE


def read_view(values: Mapping[str, str], sort: str = "step") -> View:
    """Return the view of an address. `sort`: the default order. Raise ValueError that names the
    wrong field."""
    wanted = SampleFilter(
        split=values.get("split") or str(Split.TRAIN),
        step=_number(values, "step", int),
        prompt=values.get("prompt", ""),
        sample=_number(values, "sample", int),
        finish_reason=values.get("finish", ""),
        least_reward=_number(values, "least", float),
        most_reward=_number(values, "most", float),
        sort=values.get("sort") or sort,
        reverse=bool(values.get("reverse")),
    )
    colouring = values.get("colour") or COLOURINGS[0]
    if colouring not in COLOURINGS:
        raise ValueError(f"colour is {colouring!r}: give one of {', '.join(COLOURINGS)}")
    number = _number(values, "page", int)
    number = 1 if number is None else number
    if not 1 <= number <= _MOST_PAGES:
        raise ValueError(f"page is {number}: give a number from 1 to {_MOST_PAGES:,}")
    return View(wanted, values.get("grep", ""), colouring, number)


def list_page(run: str, values: Mapping[str, str], view: View, page: Page, pieces: Pieces) -> str:
    """Return the page of the matching samples, with a form for the filter."""
    items = "".join(_item(sample, view.colouring, pieces) for sample in page.samples)
    parts = (
        _form(values, view),
        f"<p>{escape(counted(page))}</p>",
        items,
        _turning(values, view, page),
    )
    return document(f"{run}: samples", *parts)


def response_page(run: str, sample: Sample, view: View, pieces: Pieces) -> str:
    """Return the page of one sample."""
    key = _key(sample)
    colours = "".join(
        f'<a href="response?{_address(key, colour=name)}">by {name}</a>' for name in COLOURINGS
    )
    meanings = " ".join(
        f'<span class="{name}">{escape(word)}</span>'
        for name, word in legend(sample, view.colouring)
    )
    over_epochs = f'<a href="prompt?{_prompt_address(sample)}">this prompt over epochs</a>'
    known = "".join(
        f"<dt>{_shown(name)}</dt><dd>{_shown(value)}</dd>"
        for name, value in properties(sample).items()
    )
    return document(
        f"{run}: {sample.split} step {sample.step}, sample {sample.sample_index} of "
        f"{sample.prompt_key}",
        f'<nav><a href="./">all samples</a>{over_epochs}</nav><dl>{known}</dl>',
        f"<h2>prompt</h2><pre>{_shown(''.join(pieces(sample.prompt_token_ids)))}</pre>",
        f"<h2>response</h2><nav>{colours}</nav><p>{meanings}</p>",
        f"<pre>{_coloured(sample, view.colouring, pieces)}</pre>",
    )


def prompt_page(run: str, values: Mapping[str, str], view: View, page: Page, pieces: Pieces) -> str:
    """Return the page of one prompt: a column for each epoch, the latest first."""
    columns = "".join(
        f"<section><h2>epoch {epoch}</h2>"
        + "".join(_item(sample, view.colouring, pieces, with_prompt=False) for sample in samples)
        + "</section>"
        for epoch, samples in groupby(page.samples, key=lambda sample: sample.epoch)
    )
    prompt = "".join(pieces(page.samples[0].prompt_token_ids)) if page.samples else ""
    return document(
        f"{run}: prompt {view.wanted.prompt}",
        f'<nav><a href="./">all samples</a></nav><pre class="prompt">{_shown(prompt)}</pre>',
        f'<p>{escape(counted(page))}</p><div class="epochs">{columns}</div>',
        _turning(values, view, page),
    )


def error_page(run: str, error: str) -> str:
    """Return a page that says what is wrong with a request."""
    link = '<nav><a href="./">all samples</a></nav>'
    return document(f"{run}: samples", f'{link}<p class="wrong">{_shown(error)}</p>')


def document(title: str, *parts: str) -> str:
    """Return a whole page. The parts are HTML, the title is text."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_shown(title)}</title>'
        f"<style>{STYLE}</style><h1>{_shown(title)}</h1>{''.join(parts)}</html>"
    )


def _item(sample: Sample, colouring: str, pieces: Pieces, *, with_prompt: bool = True) -> str:
    known = properties(sample)
    names = ("reward", "tokens", "finish", "entropy", "policy version", "drafts")
    about = ", ".join(f"{name} {known[name]}" for name in names)
    num_left = len(sample.response_token_ids) - _SHOWN_TOKENS
    rest = f'<span class="rest"> .. {num_left:,} more tokens</span>' if num_left > 0 else ""
    prompt = _shown("".join(pieces(sample.prompt_token_ids[-_SHOWN_TOKENS:])))
    return (
        f'<article><h2><a href="response?{_address(_key(sample))}">step {sample.step}, sample '
        f"{sample.sample_index}</a> "
        f'<a href="prompt?{_prompt_address(sample)}">{_shown(sample.prompt_key[:KEY_CHARACTERS])}'
        f"</a></h2><div>{_shown(about)}</div>"
        + (f'<pre class="prompt">{prompt}</pre>' if with_prompt else "")
        + f"<pre>{_coloured(sample, colouring, pieces, _SHOWN_TOKENS)}{rest}</pre></article>"
    )


def _coloured(sample: Sample, colouring: str, pieces: Pieces, limit: int | None = None) -> str:
    return "".join(
        f'<span class="{name}">{_shown(text)}</span>'
        for name, text in runs(sample, pieces, colouring, limit)
    )


def _form(values: Mapping[str, str], view: View) -> str:
    wanted = view.wanted
    fields = [
        _choice("split", [str(split) for split in Split], wanted.split),
        _input("step", values),
        _input("prompt", values, "key begins with"),
        _input("grep", values, "response contains"),
        _choice("finish", ["", *map(str, FinishReason)], wanted.finish_reason),
        _input("least", values, "least reward"),
        _input("most", values, "most reward"),
        _choice("sort", list(SORTS), wanted.sort),
        _choice("reverse", ["", "yes"], "yes" if wanted.reverse else ""),
        _choice("colour", list(COLOURINGS), view.colouring),
    ]
    return f"<form>{''.join(fields)}<button>Show</button></form>"


def _input(name: str, values: Mapping[str, str], label: str = "") -> str:
    value = escape(values.get(name, ""))
    return f'<label>{label or name}<input name="{name}" value="{value}"></label>'


def _choice(name: str, options: Sequence[str], chosen: str) -> str:
    shown = "".join(
        f"<option{' selected' if option == chosen else ''}>{escape(option)}</option>"
        for option in options
    )
    return f'<label>{name}<select name="{name}">{shown}</select></label>'


def _turning(values: Mapping[str, str], view: View, page: Page) -> str:
    """Return links to the page before and the page after."""
    is_full = len(page.samples) == PAGE_SIZE
    more = is_full if page.num_searched is not None else view.offset + PAGE_SIZE < page.num_matching
    links = [("previous", view.number - 1)] if view.number > 1 else []
    links += [("next", view.number + 1)] if more else []
    shown = "".join(
        f'<a href="?{_address(values, page=number)}">{name} {PAGE_SIZE}</a>'
        for name, number in links
    )
    return f"<nav>{shown}</nav>"


def _key(sample: Sample) -> dict[str, Any]:
    names = ("split", "step", "prompt", "sample")
    return dict(zip(names, sample.key, strict=True))


def _prompt_address(sample: Sample) -> str:
    return _address({"split": sample.split, "prompt": sample.prompt_key})


def _address(values: Mapping[str, Any], **changes: Any) -> str:
    return escape(urlencode({**values, **changes}))


def _shown(text: str) -> str:
    return escape(printable(text, lines=True))


def _number(values: Mapping[str, str], name: str, kind: type[int] | type[float]) -> Any:
    text = values.get(name, "").strip()
    try:
        return kind(text[:20]) if text else None
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} is {text[:20]!r}: give {what}") from error
