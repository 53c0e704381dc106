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
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

Component = dict[str, Any]
"""Normalizer or pre-tokenizer of a tokenizer.json."""
Change = Callable[[Component], Component | None]
"""Function that returns a changed component, or None to leave it out."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
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
        self._backend = tokenizer.backend_tokenizer
        given = json.loads(self._backend.to_str())
        self.control = control_tokens(given["added_tokens"], template)
        """Tokens that only a template may write, by id."""
        self._unknown = tokenizer.unk_token_id
        self._never_text = self.control.keys() - _ids_of_text(self.control, tokenizer.unk_token_id)
        self._template = _load(given)
        self._plain = self._splitting(given, _inside)
        for token in self.control.values():
            self.encode(token)

    def parts(self, text: str) -> list[int | str]:
        """Return a template's text split at its control tokens. They come as ids."""
        found = self._template.encode(text, add_special_tokens=False)
        parts: list[int | str] = []
        end = 0
        for id, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if self._is_control(id, text[start:stop]):
                parts += [text[end:start], id]
                end = stop
        return [part for part in (*parts, text[end:]) if part != ""]

    def encode(self, text: str, *, after_token: bool = True) -> list[int]:
        """Return the tokens of text that follows a control token or, otherwise, follows text.
        Raises ValueError if there is a control token among them."""
        encoder = self._plain if after_token else self._joined
        ids = encoder.encode(text, add_special_tokens=False).ids
        if found := self._never_text & set(ids):
            raise ValueError(
                f"the tokenizer makes the control token {self.control[min(found)]!r} of plain "
                "text, so a tool could end a turn: use a model with a BPE tokenizer"
            )
        return ids

    def knows(self, text: str) -> bool:
        """Return whether the tokenizer has tokens for all characters of a text."""
        return self._unknown is None or self._unknown not in self.encode(text)

    def starts(self, text: str) -> list[int]:
        """Return the position in the text at which each of its tokens starts."""
        found = self._plain.encode(text, add_special_tokens=False)
        return [start for start, _ in found.offsets]

    @cached_property
    def _joined(self) -> Tokenizer:
        """Tokenizer for text that follows text, so no token gets a space before it."""
        return self._splitting(json.loads(self._backend.to_str()), _after_text)

    def _splitting(self, given: Component, change: Change) -> Tokenizer:
        """Return a tokenizer that splits control tokens in a text. `given`: tokenizer.json."""
        return _load(_changed(_with_special(given, self.control), change), splits=True)

    def _is_control(self, id: int, text: str) -> bool:
        """Return whether a token of this text is a control token. The token of unknown characters
        may be one, and is one where it is written out."""
        if id == self._unknown:
            return text.strip() == self.control.get(id)
        return id in self.control


def control_tokens(added: Sequence[Mapping[str, Any]], template: str) -> dict[int, str]:
    """Return the control tokens by id. `added`: `added_tokens` of tokenizer.json."""
    return {
        token["id"]: token["content"]
        for token in added
        if token["special"] or (_TAG.fullmatch(token["content"]) and token["content"] in template)
    }


def _ids_of_text(control: Mapping[int, str], unknown: int | None) -> set[int]:
    """Return control tokens that text may have: of unknown characters, and of single bytes."""
    return {id for id, token in control.items() if id == unknown or _BYTE.fullmatch(token)}


def _with_special(specification: Component, ids: Container[int]) -> Component:
    """Return a tokenizer.json in which exactly these added tokens are special."""
    added = [{**one, "special": one["id"] in ids} for one in specification["added_tokens"]]
    return {**specification, "added_tokens": added}


def _changed(specification: Component, change: Change) -> Component:
    """Return a tokenizer.json with changed normalizers and pre-tokenizers."""
    names = ("normalizer", "pre_tokenizer")
    changed = {name: _changed_component(specification[name], change) for name in names}
    return {**specification, **changed}


def _changed_component(component: Component | None, change: Change) -> Component | None:
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
