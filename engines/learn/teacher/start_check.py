"""Ask each of a teacher's servers, before a run starts, whether it can teach the policy."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx

from refrain.engines.learn.teacher.client import TeacherBusy, TeacherClient, TeacherError
from refrain.schemas.teacher import SETTING, TeacherServerConfig

_SENTENCE = "Naïve 3.14 × 2: def f(x): return x[1:] # 日本語, Ответ\n\n\t"
_NUM_PIECES = (512, 64, 8)
"""Tokens of the vocabulary in the text that is compared, from the most to the fewest."""


def check_teacher(
    config: TeacherServerConfig, tokenizer: Any, num_rows: int, max_tokens: int
) -> None:
    """Raise ValueError unless every server has the model, its prompt log-probabilities, the
    policy's tokens and room for samples of `max_tokens` tokens.

    `tokenizer`: the policy's. `num_rows`: rows of the policy's embedding. Each server gets three
    requests. None is repeated.
    """
    text, ids = common_text(tokenizer, max_tokens)
    last = max(id for id in tokenizer.get_vocab().values() if id < num_rows)
    try:
        asyncio.run(_check_all(config, text, ids, last, max_tokens))
    except TeacherBusy as error:
        fix = f"Start the server, or correct {SETTING}.urls"
        raise ValueError(f"{SETTING}: {error}. {fix}") from error
    except TeacherError as error:
        raise ValueError(f"{SETTING}: {error}") from error


def common_text(tokenizer: Any, max_tokens: int) -> tuple[str, list[int]]:
    """Return a text and its tokens, at most `max_tokens` if possible: a sentence in several
    scripts, and tokens from all over the vocabulary, special ones included."""
    for text in _texts(tokenizer):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= max_tokens:
            break
    return text, ids


def _texts(tokenizer: Any) -> Iterator[str]:
    vocabulary = sorted(tokenizer.get_vocab().values())
    for num in _NUM_PIECES:
        pieces = [tokenizer.decode([id]) for id in vocabulary[:: max(1, len(vocabulary) // num)]]
        # A part of a character is no text.
        whole = [piece for piece in pieces if "\ufffd" not in piece]
        yield " ".join([_SENTENCE, *whole])
    yield _SENTENCE
    yield " ".join(whole[-2:])


async def _check_all(
    config: TeacherServerConfig, text: str, ids: list[int], last: int, max_tokens: int
) -> None:
    client = TeacherClient(config)
    async with client.connect() as http:
        for url in client.urls:
            await _check_model(client, http, url, config.model, max_tokens)
            answer = await client.call(http, "POST", f"{url}/completions", client.request(text))
            client.read(answer, ids, url)
            # Its embedding may have fewer rows than the policy has tokens.
            prompt = [*ids[: max_tokens - 1], last]
            answer = await client.call(http, "POST", f"{url}/completions", client.request(prompt))
            client.read(answer, prompt, url)


async def _check_model(
    client: TeacherClient, http: httpx.AsyncClient, url: str, name: str, max_tokens: int
) -> None:
    """Raise TeacherError unless the server lists the model, with enough context if it says so."""
    answer = await client.call(http, "GET", f"{url}/models")
    match answer:
        case {"data": [*models]} if all(isinstance(one, dict) for one in models):
            by_name = {str(one.get("id")): one for one in models}
        case _:
            raise TeacherError(
                f"{url}/models lists no models: give the address of an OpenAI-compatible server, "
                f"such as http://host:8000/v1, in {SETTING}.urls"
            )
    if name not in by_name:
        raise TeacherError(
            f"{url} has no model {name!r}, but {', '.join(by_name) or 'none'}: set {SETTING}.model "
            "to one of these"
        )
    context = by_name[name].get("max_model_len")
    if isinstance(context, int) and context < max_tokens + 1:
        raise TeacherError(
            f"{url} has a context of {context} tokens for {name}, and a sample has up to "
            f"{max_tokens} (data.max_prompt_tokens + data.max_response_tokens), and one that the "
            f"server adds: start it with --max-model-len {max_tokens + 1}, or lower these settings"
        )
