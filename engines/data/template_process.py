"""Script that renders and tokenises prompts, one request per line. It imports nothing of refrain,
and no torch.

    parent ── stdin:  {"seconds", "characters"} and
                        {"file"}                        a tokenizer.json to try, or
                        {"key", "tokenizer"}            its content to keep under a key, or
                        {"key", "arguments", "now"}     of render_jinja_template, and its date
           ◄─ stdout: {"text"} or {"tokens"}, {"error"} or {"stopped"}

The process limits itself. Too much memory raises an error, and SIGXCPU ends it after too much CPU
time. So it uses at most `seconds` of CPU time after its parent was killed.
"""

import json
import math
import random
import resource
import sys
from datetime import datetime
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

MEMORY_BYTES = 2 * 2**30
"""Memory limit for tokenizer and template, on top of the memory that the process starts with."""
MAX_REASON = 300
TOKENS_PER_CHARACTER = 16
"""Most tokens per character of a text."""
MAX_ID = 2**24
"""Largest token id, because some loaders make a list of that length."""
PROBE = "A probe: 1 + 2 = 3, in several words.\n" * 4
"""Text to try a tokenizer with."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    limit = _memory() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    kept: dict[str, Tokenizer] = {}
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(_answer(line, kept)) + "\n")
        sys.stdout.flush()


def _answer(line: bytes, kept: dict[str, Tokenizer]) -> dict[str, Any]:
    """Return the reply to a request. `error` concerns this prompt only. `stopped`: the next prompt
    would fail too."""
    try:
        request = json.loads(line)
        _limit_cpu(request["seconds"])
        return _done(request, kept)
    except MemoryError:
        return {"stopped": f"takes over {MEMORY_BYTES // 2**20} MiB of memory"}
    except RecursionError:
        return {"stopped": "calls itself without end"}
    except Exception as error:  # A template may raise anything.
        return {"error": (str(error) or type(error).__name__)[:MAX_REASON]}


def _done(request: dict[str, Any], kept: dict[str, Tokenizer]) -> dict[str, Any]:
    if file := request.get("file"):
        tokenizer = Tokenizer.from_file(file)
        last = max(tokenizer.get_vocab().values(), default=0)
        if last > MAX_ID:
            return {"error": f"its token ids go to {last:,}, over {MAX_ID:,}"}
        return _tokens(tokenizer, PROBE)
    if content := request.get("tokenizer"):
        tokenizer = kept[request["key"]] = Tokenizer.from_str(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return {"tokens": []}
    (text,), _ = render_jinja_template(**_reproducible(**request))
    if len(text) > request["characters"]:
        return {"stopped": f"makes {len(text):,} characters, over {request['characters']:,}"}
    return _tokens(kept[key], text) if (key := request.get("key")) else {"text": text}


def _reproducible(arguments: dict[str, Any], now: str | None, **_: Any) -> dict[str, Any]:
    """Return arguments that make the text reproducible: the template sees the run's time instead of
    the clock's, and its random choices (filter `random`) depend only on the messages."""
    random.seed(json.dumps(arguments["conversations"]))
    if now is None:
        return arguments
    return {"strftime_now": datetime.fromisoformat(now).strftime, **arguments}


def _tokens(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    found = tokenizer.encode(text, add_special_tokens=False)
    if len(found) > TOKENS_PER_CHARACTER * (len(text) + 1):
        return {"stopped": f"makes {len(found):,} tokens of {len(text):,} characters"}
    return {"tokens": found.ids}


def _memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit_cpu(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
