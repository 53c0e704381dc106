"""Renders chat templates, one request a line. A script: it imports nothing of refrain, nor torch.

    parent ── stdin:  {"seconds", "characters", "arguments" of render_jinja_template}
           ◄─ stdout: {"text"}, {"error"} or {"stopped"}

Its own limits end it: for memory by an error, for CPU time by SIGXCPU, so that it does not outlive
a parent that was killed by more than `seconds`.
"""

import json
import math
import resource
import sys

from transformers.utils.chat_template_utils import render_jinja_template

MEMORY_BYTES = 512 * 2**20
"""Memory for a template, beside what the process has when it begins."""
MAX_REASON = 300


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    limit = _memory() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(_answer(line)) + "\n")
        sys.stdout.flush()


def _answer(line: bytes) -> dict[str, str]:
    """`error`: of this prompt; `stopped`: what the template would do with any."""
    try:
        request = json.loads(line)
        _limit_cpu(request["seconds"])
        (text,), _ = render_jinja_template(**request["arguments"])
    except MemoryError:
        return {"stopped": f"takes over {MEMORY_BYTES // 2**20} MiB of memory"}
    except RecursionError:
        return {"stopped": "calls itself without end"}
    except Exception as error:  # The template decides which.
        return {"error": (str(error) or type(error).__name__)[:MAX_REASON]}
    if len(text) > request["characters"]:
        return {"stopped": f"makes {len(text):,} characters, over {request['characters']:,}"}
    return {"text": text}


def _memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit_cpu(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
