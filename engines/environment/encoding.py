r"""Encode text between control tokens. Text that looks like a control token stays text.

    "\n<|im_start|>tool\n" + an answer + "<|im_end|>"
       │ parts: looks for control tokens in the template's text only
    "\n", 151644, "tool\n", an answer, 151645
       │ encode: all text between two control tokens at once
    the tokens that the tokenizer makes of the whole, if the answer has no control token in it

Special tokens are control tokens. So are tags that the chat template writes, such as `<think>`: to
many tokenizers these are no special tokens.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

Component = dict[str, Any]
"""Normalizer or pre-tokenizer of a tokenizer.json."""
_TAG = re.compile(r"[<\[].+[>\]]", re.DOTALL)


class PlainEncoder:
    """Encoder of text between control tokens."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        """`template`: source of the chat template. Raises ValueError for a tokenizer without
        tokenizer.json."""
        if not tokenizer.is_fast or tokenizer.split_special_tokens:
            raise ValueError(
                "environments need a tokenizer with a tokenizer.json that keeps special tokens "
                "whole: convert the tokenizer, or set split_special_tokens to false in "
                "tokenizer_config.json"
            )
        given = json.loads(tokenizer.backend_tokenizer.to_str())
        control = control_tokens(given["added_tokens"], template)
        self.control_ids = control.keys() - {tokenizer.unk_token_id}
        """Ids that only a template may write. Unknown characters are text."""
        self._specification = _with_special(given, control.keys())
        self._template = _load(given)
        self._plain = _load(_changed(self._specification, _inside), splits=True)
        self._refuse_readable(control)

    def parts(self, text: str) -> list[int | str]:
        """Return a template's text split at its control tokens. They come as ids."""
        found = self._template.encode(text, add_special_tokens=False)
        parts: list[int | str] = []
        end = 0
        for id, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if id in self.control_ids:
                parts += [text[end:start], id]
                end = stop
        return [part for part in (*parts, text[end:]) if part != ""]

    def encode(self, text: str, *, after_token: bool = True) -> list[int]:
        """Return the tokens of text that follows a control token or, otherwise, follows text."""
        encoder = self._plain if after_token else self._joined
        return encoder.encode(text, add_special_tokens=False).ids

    def starts(self, text: str) -> list[int]:
        """Return the position in the text at which each of its tokens starts."""
        found = self._plain.encode(text, add_special_tokens=False)
        return [start for start, _ in found.offsets]

    @cached_property
    def _joined(self) -> Tokenizer:
        """Tokenizer for text that follows text, so no token gets a space before it."""
        return _load(_changed(self._specification, _after_text), splits=True)

    def _refuse_readable(self, control: Mapping[int, str]) -> None:
        """Raise ValueError if the text of a control token gives that token."""
        for token in control.values():
            if found := self.control_ids & set(self.encode(token)):
                raise ValueError(
                    f"the tokenizer makes the control token {control[min(found)]!r} of the plain "
                    f"text {token!r}, so a tool could end a turn: use a model with a BPE tokenizer"
                )


def control_tokens(added: Sequence[Mapping[str, Any]], template: str) -> dict[int, str]:
    """Return the control tokens by id. `added`: `added_tokens` of tokenizer.json."""
    return {
        token["id"]: token["content"]
        for token in added
        if token["special"] or (_TAG.fullmatch(token["content"]) and token["content"] in template)
    }


def _with_special(specification: Component, ids: Any) -> Component:
    """Return a tokenizer.json in which exactly these added tokens are special."""
    added = [{**one, "special": one["id"] in ids} for one in specification["added_tokens"]]
    return {**specification, "added_tokens": added}


def _changed(
    specification: Component, change: Callable[[Component], Component | None]
) -> Component:
    """Return a tokenizer.json with changed normalizers and pre-tokenizers."""
    names = ("normalizer", "pre_tokenizer")
    changed = {name: _changed_component(specification[name], change) for name in names}
    return {**specification, **changed}


def _changed_component(
    component: Component | None, change: Callable[[Component], Component | None]
) -> Component | None:
    if component is None or component["type"] != "Sequence":
        return component and change(component)
    name = "normalizers" if "normalizers" in component else "pretokenizers"
    inner = [_changed_component(one, change) for one in component[name]]
    return {**component, name: [one for one in inner if one is not None]}


def _inside(component: Component) -> Component:
    """Return a component that knows that its text is not the beginning."""
    if component["type"] == "Metaspace" and component["prepend_scheme"] == "first":
        return {**component, "prepend_scheme": "never"}
    return component


def _after_text(component: Component) -> Component | None:
    """Return a component that puts no space before its text. None: none is needed."""
    match component["type"]:
        case "Prepend":
            return None
        case "Metaspace":
            return {**component, "prepend_scheme": "never"}
        case "ByteLevel":
            return {**component, "add_prefix_space": False}
        case _:
            return component


def _load(specification: Component, *, splits: bool = False) -> Tokenizer:
    """Return a tokenizer. `splits`: whether special tokens in a text stay text."""
    tokenizer = Tokenizer.from_str(json.dumps(specification))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = splits
    return tokenizer
