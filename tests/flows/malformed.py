"""Generate malformed configs, overrides, models, profiles, scorers, data files and runs. Each case
is wrong by construction."""

import functools
import json
import random
import shutil
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Union

import yaml
from pydantic import BaseModel

from refrain.schemas.config import TrainConfig
from refrain.schemas.secret import SecretUrl
from tests.conftest import DEMO, REPOSITORY
from tests.flows.commands import write_config

HUGE = 10**400
NO_SERVER = "urls: 'http://127.0.0.1:9/v1', model: big"
"""A teacher's server at a port where none listens."""
TORN = "half \udcff"
"""A command-line argument with a byte that is not UTF-8, as Python decodes it."""


@dataclass(frozen=True)
class Malformed:
    """Arguments that `refrain train` must refuse."""

    what: str
    arguments: tuple[str, ...]
    named: str
    """File, setting or override that the error must name."""


@dataclass(frozen=True)
class Workplace:
    """Builder of one case: it starts from a good config in a directory of its own."""

    directory: Path
    random: random.Random

    @functools.cached_property
    def config(self) -> Path:
        return write_config(self.directory)

    def values(self) -> dict[str, Any]:
        return yaml.safe_load(self.config.read_text())

    def with_values(self, what: str, values: Any, named: str) -> Malformed:
        file = self.directory / "bad.yaml"
        file.write_text(yaml.safe_dump(values))
        return Malformed(what, (str(file),), named)

    def with_text(self, what: str, content: bytes) -> Malformed:
        file = self.directory / "bad.yaml"
        file.write_bytes(content)
        return Malformed(what, (str(file),), str(file))

    def with_override(self, what: str, override: str, named: str) -> Malformed:
        return Malformed(what, (str(self.config), override), named)


def cases(seed: int, num: int, directory: Path) -> Iterator[Malformed]:
    """Yield `num` cases in directories of their own, one kind after the other."""
    drawn = random.Random(seed)
    for number in range(num):
        place = Workplace(directory / str(number), random.Random(drawn.random()))
        place.directory.mkdir()
        yield MAKERS[number % len(MAKERS)](place)
        shutil.rmtree(place.directory)


def _given(kind: Any) -> Any:
    """Return the type inside an optional type, and any other type as it is."""
    others = [one for one in typing.get_args(kind) if one is not type(None)]
    is_union = typing.get_origin(kind) in (Union, types.UnionType)
    return others[0] if is_union and len(others) == 1 else kind


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the type of each setting that holds a value."""
    for name, field in model.model_fields.items():
        kind = _given(field.annotation)
        if name in ("environment", "teacher_server"):
            continue  # It has a required setting, which the error would name first.
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _leaves(kind, f"{prefix}{name}.")
        elif name != "reward":
            yield prefix + name, kind


WRONG: dict[Any, list[Any]] = {
    int: ["many", "1.5", 1.5, [], {}, -3, HUGE, float("inf")],
    float: ["fast", [], {}, -1.0, float("nan"), float("inf"), float("-inf")],
    bool: ["perhaps", 7, [], {}, 0.5],
    str: [5, [], {"a": 1}, 1.5, "a\0b"],
    Path: [5, [], {"a": 1}, 1.5, "a\0b"],
    SecretUrl: [5, [], {"a": 1}, 1.5, "a\0b"],
    datetime: ["text", [], {}, "2026-13-01"],
    tuple: [5, "text", {"a": 1}, [[]], [{}], [None]],
    dict: [5, "text", [1, 2], 1.5],
    Literal: ["other", 5, [], {}, 1.5],
}


def _wrong_values(kind: Any) -> list[Any]:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _wrong_values(_given(kind.__origin__))
    if origin in (Union, types.UnionType):
        first, *others = map(_wrong_values, typing.get_args(kind))
        return [value for value in first if all(value in other for other in others)]
    return WRONG[origin or kind]


SETTINGS = tuple(_leaves(TrainConfig))


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[last] = value


def wrong_value(place: Workplace) -> Malformed:
    name, kind = place.random.choice(SETTINGS)
    value = place.random.choice(_wrong_values(kind))
    values = place.values()
    _set(values, name, value)
    return place.with_values(f"{name}: {str(value)[:20]!r}", values, name)


def wrong_override(place: Workplace) -> Malformed:
    name, kind = place.random.choice(SETTINGS)
    texts = [v for v in _wrong_values(kind) if isinstance(v, int | float) or v in ("many", "other")]
    value = place.random.choice(texts or ["{"])
    return place.with_override(f"{name}={str(value)[:20]}", f"{name}={value}", name)


def misspelt_setting(place: Workplace) -> Malformed:
    name, _ = place.random.choice(SETTINGS)
    section, _, last = name.rpartition(".")
    at = place.random.randrange(len(last))
    wrong = f"{section}.{last[:at]}q{last[at:]}".removeprefix(".")
    values = place.values()
    _set(values, wrong, 1)
    return place.with_values(f"no setting {wrong}", values, wrong)


def section_of_another_kind(place: Workplace) -> Malformed:
    sections = [name for name, value in place.values().items() if isinstance(value, dict)]
    name = place.random.choice([*sections, "reward", "drafting", "histopipe", "algorithm"])
    value = place.random.choice([5, "text", [1], None, True])
    return place.with_values(f"{name} is {value}", place.values() | {name: value}, name)


def setting_left_out(place: Workplace) -> Malformed:
    name = place.random.choice(["model", "data", "model.path", "data.train"])
    values = place.values()
    section, _, last = name.rpartition(".")
    del (values[section] if section else values)[last]
    return place.with_values(f"no {name}", values, name)


def settings_at_odds(place: Workplace) -> Malformed:
    override, named = place.random.choice(
        [
            ("trainer.minibatches_per_step=99", "trainer.minibatches_per_step"),
            ("trainer.micro_batch_tokens=100", "trainer.micro_batch_tokens"),
            ("data.max_response_tokens=9000", "data.max_response_tokens"),
            ("rollout.temperature=0", "rollout.temperature"),
            ("rollout.tp_degree=3", "rollout.tp_degree"),
            ("drafting.min_match=17", "drafting.min_match"),
            ("pat.tp_degrees=[2]", "pat.tp_degrees"),
            ("pat.tp_degrees=[0]", "pat.tp_degrees"),
            ("algorithm.overlong_buffer_tokens=256", "algorithm.overlong_buffer_tokens"),
            ("specactor.drafter=nobody", "specactor.drafter"),
            ("specactor.head=nowhere", "specactor.head"),
            ("specactor.draft_models=[{name: ngram, path: x}]", "specactor.draft_models"),
            ("specactor.draft_models=[{name: small, path: nowhere}]", "specactor.draft_models"),
            ("algorithm.teacher_server={model: big}", "algorithm.teacher_server.urls"),
            (f"algorithm.teacher_server={{{NO_SERVER}}}", "algorithm.teacher_server"),
            (
                "algorithm.teacher_server={urls: 'ftp://host/v1', model: big}",
                "algorithm.teacher_server.urls",
            ),
            (
                f"algorithm.teacher_server={{{NO_SERVER}, at_once: 0}}",
                "algorithm.teacher_server.at_once",
            ),
            ("algorithm.teacher=http://host:8000/v1", "algorithm.teacher_server.urls"),
            ("{validate_every_steps: 1, data.validation: []}", "has no '='"),
        ]
    )
    return place.with_override(override, override, named)


ALIASES = b"\nseed: &a0 [1]\n" + b"".join(
    b"seed%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 7)
)
"""Expands to 9 ** 6 values."""

BROKEN_YAML: tuple[tuple[str, bytes], ...] = (
    ("a tab", b"\n\tseed: 1\n"),
    ("an open bracket", b"\nseed: [1, 2\n"),
    ("an open quote", b'\nseed: "1\n'),
    ("a doubled setting", b"\nseed: 1\nseed: 2\n"),
    ("two documents", b"\n---\nseed: 1\n"),
    ("an unknown alias", b"\nseed: *nobody\n"),
    ("a list in itself", b"\nseed: &a [*a]\n"),
    ("a bomb of aliases", ALIASES),
    ("invalid UTF-8", b"\nprofile: \xff\xfe\n"),
    ("a zero byte", b"\nprofile: a\0b\n"),
    ("a tag", b"\nseed: !!python/object/apply:os.getpid []\n"),
    ("an interpolation of nothing", b"\nseed: ${nowhere}\n"),
    ("an interpolation of itself", b"\nseed: ${seed}\n"),
    ("an open interpolation", b"\nseed: ${oc.env:\n"),
    ("no such variable", b"\nseed: ${oc.env:NO_SUCH_VARIABLE}\n"),
    ("an unknown resolver", b"\nseed: ${nobody:1}\n"),
    ("depth", b"\nseed: " + b"[" * 3000 + b"]" * 3000 + b"\n"),
    ("a number of 5,000 digits", b"\nseed: " + b"9" * 5000 + b"\n"),
    ("a complex key", b"\n? [a, b]\n: 1\n"),
    ("a date", b"\nseed: 2020-01-01\n"),
    ("a merge of a number", b"\n<<: 5\n"),
    ("a set", b"\nseed: !!set {1, 2}\n"),
    ("binary", b"\nseed: !!binary gIGC\n"),
)


def broken_yaml(place: Workplace) -> Malformed:
    what, text = place.random.choice(BROKEN_YAML)
    good = b"\n".join(
        line for line in place.config.read_bytes().splitlines() if not line.startswith(b"seed")
    )
    return place.with_text(what, good + text)


def no_config(place: Workplace) -> Malformed:
    what, content = place.random.choice(
        [
            ("nothing", b""),
            ("blanks", b"  \n\n"),
            ("a list", b"- 1\n- 2\n"),
            ("a word", b"train\n"),
            ("a number", b"5\n"),
            ("null", b"null\n"),
            ("noise", place.random.randbytes(200)),
            ("a Parquet file", (DEMO / "data" / "validation.parquet").read_bytes()),
            ("UTF-16 cut short", "name: demo\n".encode("utf-16")[:-1]),
        ]
    )
    return place.with_text(what, content)


def broken_override(place: Workplace) -> Malformed:
    name, _ = place.random.choice(SETTINGS)
    override = place.random.choice(
        [
            name,
            f"{name}:1",
            f"{name}=[1",
            f"{name}={{",
            f"{name}=${{nowhere}}",
            f"{name}=${{{name}}}",
            f"{name}=${{oc.env:",
            f"{name}.further=1",
            f"{name}[0].x=1",
            f".{name}=1",
            f"{name}.=1",
            f"{name.replace('.', '..')}..x=1",
            f"profile={TORN}",
            "=1",
            "=",
        ]
    )
    named = name.partition(".")[0]
    if override.startswith((".", "=")):
        named = "''"
    elif TORN in override:
        named = "profile"
    return place.with_override(f"override {override}", override, named)


def wrong_reward(place: Workplace) -> Malformed:
    reward, named = place.random.choice(
        [
            ({"type": "other"}, "reward"),
            ({"type": 5}, "reward"),
            ({}, "reward"),
            ({"type": "function"}, "path"),
            ({"type": "function", "path": "nowhere.py"}, "nowhere.py"),
            ({"type": "function", "path": str(place.directory)}, str(place.directory)),
            ({"type": "function", "path": "a.py", "kwargs": [1]}, "kwargs"),
            ({"type": "function", "path": "a.py", "kwargs": {"a": [1]}}, "kwargs"),
            ({"type": "builtin", "path": "a.py"}, "path"),
            ({"type": "builtin", "timeout_s": 0}, "timeout_s"),
        ]
    )
    return place.with_values(f"reward: {reward}", place.values() | {"reward": reward}, named)


def damaged(place: Workplace, content: bytes) -> tuple[str, bytes]:
    """Damage the content of a JSON file. Return a description, and content that is not JSON."""
    cut = place.random.randrange(1, len(content) - 1)
    return place.random.choice(
        [
            ("nothing", b""),
            ("cut short", content[:cut]),
            ("noise", place.random.randbytes(100)),
            ("a list", b"[1, 2]"),
            ("a word", b'"word"'),
            ("null", b"null"),
            ("invalid UTF-8", content[:1] + b'"\xff": 1, ' + content[1:]),
            ("depth", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
            ("a number of 5,000 digits", b'{"a": ' + b"9" * 5000 + b"}"),
            ("a pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        ]
    )


def broken_model(place: Workplace) -> Malformed:
    model = place.directory / "model"
    shutil.copytree(DEMO / "model", model)
    file = model / place.random.choice(
        ["config.json", "config.json", "tokenizer.json", "tokenizer_config.json"]
    )
    what, content = damaged(place, file.read_bytes())
    file.write_bytes(content)
    return place.with_override(f"{file.name}: {what}", f"model.path={model}", str(model))


def model_of_another_kind(place: Workplace) -> Malformed:
    model = place.directory / "model"
    shutil.copytree(DEMO / "model", model)
    file = model / "config.json"
    values: dict[str, Any] = place.random.choice(
        [
            {"architectures": 5},
            {"architectures": [5]},
            {"architectures": None},
            {"architectures": ["BertModel"]},
            {"model_type": "no_such_type"},
            {"model_type": 5},
            {"num_attention_heads": "four"},
            {"num_attention_heads": 0},
            {"max_position_embeddings": "long"},
            {"quantization_config": {"bits": 4}},
        ]
    )
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return place.with_override(f"model with {values}", f"model.path={model}", str(model))


def broken_weights(place: Workplace) -> Malformed:
    model = place.directory / "model"
    shutil.copytree(DEMO / "model", model)
    file, index = model / "model.safetensors", model / "model.safetensors.index.json"
    content = file.read_bytes()
    what = place.random.choice(["cut", "empty", "length", "gone", "index", "names", "list"])
    match what:
        case "cut":
            file.write_bytes(content[: place.random.randrange(len(content) - 1)])
        case "empty":
            file.write_bytes(b"")
        case "length":
            file.write_bytes(b"\xff" * 8 + content[8:])
        case "gone":
            file.unlink()
        case "index":
            index.write_bytes(damaged(place, b'{"weight_map": {}}')[1])
        case "names":
            index.write_text(json.dumps({"weight_map": {"a": 5}}))
        case "list":
            index.write_text(json.dumps({"weight_map": ["a"]}))
    return place.with_override(f"weights: {what}", f"model.path={model}", str(model))


def broken_profile(place: Workplace) -> Malformed:
    good = (REPOSITORY / "benchmarks" / "baselines" / "profile_demo.json").read_bytes()
    what, content = damaged(place, good)
    file = place.directory / "profile.json"
    file.write_bytes(content)
    return place.with_override(f"profile: {what}", f"profile={file}", str(file))


def profile_of_another_kind(place: Workplace) -> Malformed:
    values = json.loads((REPOSITORY / "benchmarks/baselines/profile_demo.json").read_text())
    what = place.random.choice(["no points", "a word", "below zero", "not finite", "hash"])
    point = place.random.choice(values["points"])
    match what:
        case "no points":
            values["points"] = []
        case "a word":
            point["seconds"] = "soon"
        case "below zero":
            point["seconds"] = -1.0
        case "not finite":
            point["seconds"] = float("inf")
        case "hash":
            values["model_hash"] = "0" * 16
    file = place.directory / "profile.json"
    file.write_text(json.dumps(values))
    return place.with_override(f"profile: {what}", f"profile={file}", str(file))


def broken_run(place: Workplace) -> Malformed:
    """Make a run's directory whose config cannot be read."""
    run_dir = place.directory / "runs" / "demo"
    run_dir.mkdir(parents=True)
    what, content = damaged(place, json.dumps(place.values()).encode())
    file = run_dir / "config.json"
    file.write_bytes(content)
    config = place.random.choice([(), (str(place.config),)])
    return Malformed(f"resume: {what}", (*config, "--resume", str(run_dir)), str(file))


def data_file_of_another_kind(place: Workplace) -> Malformed:
    good = (DEMO / "data" / "validation.parquet").read_bytes()
    cut = place.random.randrange(1, len(good) - 1)
    name, content = place.random.choice(
        [
            ("rows.parquet", b""),
            ("rows.parquet", good[:cut]),
            ("rows.parquet", b"PAR1" + place.random.randbytes(100) + b"PAR1"),
            ("rows.jsonl", b""),
            ("rows.jsonl", b"\n\n"),
            ("rows.jsonl", good),
            ("rows.parquet", good[cut:]),
            ("rows.json", b"[]"),
            ("rows.json", b"[1, 2"),
            ("rows.json", b"5"),
            ("rows.csv", b"a,b\n"),
            ("rows", good),
        ]
    )
    file = place.directory / name
    file.write_bytes(content)
    split = place.random.choice(["train", "validation"])
    return place.with_override(f"{split}: {name}", f"data.{split}=[{file}]", str(file))


MAKERS: tuple[Callable[[Workplace], Malformed], ...] = (
    wrong_value,
    wrong_value,
    wrong_value,
    wrong_override,
    misspelt_setting,
    section_of_another_kind,
    setting_left_out,
    settings_at_odds,
    broken_yaml,
    broken_yaml,
    no_config,
    broken_override,
    wrong_reward,
    broken_model,
    model_of_another_kind,
    broken_weights,
    broken_profile,
    profile_of_another_kind,
    broken_run,
    data_file_of_another_kind,
)
