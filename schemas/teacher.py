"""Settings of a teacher that a server holds, and what cannot act beside a teacher."""

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, SecretStr, model_validator

from refrain.schemas.base import Frozen
from refrain.schemas.inputs import Texts
from refrain.schemas.resume import Free

if TYPE_CHECKING:
    from refrain.schemas.algorithm import AlgorithmConfig

SETTING = "algorithm.teacher_server"


class TeacherServerConfig(Frozen):
    """A teacher on servers that speak OpenAI's `/v1/completions` with vLLM's `prompt_logprobs`."""

    urls: Free[Texts] = Field(min_length=1)
    """Address of the server, for example `http://host:8000/v1`. Give a list if several servers hold
    the same model: they share the samples, and one that fails is passed over."""
    model: str = Field(min_length=1)
    """Name of the teacher on its servers, for example `Qwen/Qwen3-32B`. It must have the policy's
    tokens. Each start compares them."""
    api_key: Free[SecretStr | None] = None
    """Key that the servers ask for, for example `${oc.env:TEACHER_API_KEY}`, which reads it from
    that environment variable. Set it if the server was started with a key. No record shows it."""
    timeout_s: Free[PositiveFloat] = 120.0
    """Longest time in seconds of one request, which scores one sample. For example, `600`. Raise it
    for long responses or a busy server."""
    at_once: Free[PositiveInt] = 32
    """Most requests of a trainer process at the same time, for example `128`. Raise it if the
    server has room for more, lower it if the server runs out of memory."""
    retries: Free[NonNegativeInt] = 8
    """How often a request is tried again if there is no answer, or the status is 408, 429 or 5xx.
    Pauses double from 1 to 60 seconds. For example, `20` lets a server restart for 15 minutes."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> "TeacherServerConfig":
        for url in self.urls:
            if why := _problem(url):
                raise ValueError(
                    f"{SETTING}.urls: {url.rpartition('@')[2]!r} {why}. Give an address such as "
                    "http://host:8000/v1"
                )
        key = self.api_key.get_secret_value() if self.api_key is not None else "-"
        if not (key and all("!" <= one <= "~" for one in key)):
            raise ValueError(
                f"{SETTING}.api_key is empty, or has characters that a key cannot have: correct it"
            )
        return self


def _problem(url: str) -> str | None:
    """Return why the text is no address of a server."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is no address ({error})"
    if parts.scheme not in ("http", "https") or not host or any(map(str.isspace, url)):
        return "is no address of a server"
    if "@" in parts.netloc:
        return f"has credentials, which records would show: set {SETTING}.api_key instead"
    if parts.query or parts.fragment:
        return "goes on after its path"
    return None


def teaching_conflicts(algorithm: "AlgorithmConfig") -> Iterator[tuple[bool, str]]:
    """Yield whether settings contradict a teacher, and what to do then."""
    taught, teacher = algorithm.is_taught, algorithm.teacher
    name = "algorithm.teacher" if teacher else SETTING
    yield (
        teacher is not None and str(teacher).startswith(("http:", "https:")),
        "algorithm.teacher is the directory of a model, and this is an address: set "
        f"{SETTING}.urls to it, and {SETTING}.model to the model's name there",
    )
    yield (
        teacher is not None and algorithm.teacher_server is not None,
        f"algorithm.teacher and {SETTING} are two teachers: leave one of them out",
    )
    yield (
        algorithm.reward_weight > 0.0 and not taught,
        "algorithm.reward_weight does nothing without a teacher: leave it out, or set "
        "algorithm.teacher",
    )
    yield (
        teacher is not None and algorithm.penalises_kl,
        "algorithm.teacher: the trainer holds one model beside the policy, and kl_coefficient and "
        "reward_kl_coefficient need its start: set both to 0, or leave the teacher out",
    )
    yield (
        taught and algorithm.policy_loss in ("gspo", "gmpo"),
        f"{name} gives each token an advantage of its own, and {algorithm.type} has one "
        "ratio for a response: set another type, for example grpo",
    )
    yield (
        taught and algorithm.dynamic_sampling,
        f"{name} also learns from groups of equal rewards, which dynamic_sampling leaves "
        "out: set dynamic_sampling=false",
    )
