"""Settings that earlier versions had: new names, and the values of those that cannot be set now.

RENAMED   settings that have another name now, or are one now
REMOVED   a setting that cannot be set any more, with its value

run.yaml, overrides ──► accept_renamed      an old name warns for one minor version, then it is
                                            an error that tells what to do
a run's config.json ──► current_settings    old names are replaced or dropped
                   └──► removed_changes     values that differ from now, for the resume
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import JsonValue

from refrain.schemas.algorithm import BASELINES
from refrain.schemas.resume import OnResume, SettingChange
from refrain.schemas.version import VERSION, OldNameWarning


class Removed(NamedTuple):
    """A setting that cannot be set any more."""

    value: JsonValue
    """Its value in every run now."""
    advice: str
    """Reason, or what to do instead."""
    on_resume: OnResume = OnResume.FREE
    """KEPT: a run that had another value cannot be resumed."""
    by_type: Mapping[str, JsonValue] = {}
    """Values of algorithm types that have another one."""


class Renamed(NamedTuple):
    """Settings that have another name now. Several old ones are one setting now."""

    old: tuple[str, ...]
    new: str
    since: str
    """Minor version that brought the new name, for example `0.2`. It still accepts the old name."""
    convert: Callable[..., JsonValue] | None = None
    """Returns the new value from the old ones, by the last parts of their names. A default stands
    for one that was not given. None: the value is the same."""
    example: str = ""
    """An old value and the new one, if the value changes."""

    def message(self, old: str) -> str:
        """Return what to do about an old name."""
        if self.example:
            return f"{old} is now part of {self.new}: {self.example}"
        return f"{old} is now {self.new}: rename it"


def _by_flag(flag: JsonValue, on: JsonValue, off: JsonValue) -> JsonValue:
    """Return the value for a flag. Anything else stays, so that the config refuses it."""
    return on if flag is True else off if flag is False else flag


def _scale_rewards(normalise_by_std: JsonValue = True, std_over: str = "group") -> JsonValue:
    return _by_flag(normalise_by_std, std_over, "none")


def _tis_mode(tis_level: str = "token", tis_reject: JsonValue = False) -> JsonValue:
    return _by_flag(tis_reject, f"{tis_level}_mask", f"{tis_level}_truncate")


def _staleness(mode: JsonValue) -> JsonValue:
    return 1 if mode == "pipelined" else 0 if mode == "sync" else mode


_LOCALE = "scorers have LANG=C.UTF-8 and TZ=UTC. Name variables of your own in reward.environment"

RENAMED = (
    Renamed(("rollout.weights",), "rollout.weight_sync", "0.2"),
    Renamed(("histopipe.oversample",), "rollout.oversample", "0.2"),
    Renamed(
        ("algorithm.normalise_by_std", "algorithm.std_over"),
        "algorithm.scale_rewards",
        "0.2",
        _scale_rewards,
        "`normalise_by_std: false` is now `scale_rewards: none`",
    ),
    Renamed(
        ("algorithm.tis_level", "algorithm.tis_reject"),
        "algorithm.tis_mode",
        "0.2",
        _tis_mode,
        "`tis_reject: true` is now `tis_mode: token_mask`",
    ),
    Renamed(
        ("mode",),
        "staleness",
        "0.2",
        _staleness,
        "`mode: pipelined` is now `staleness: 1`",
    ),
    Renamed(
        ("histopipe.enabled",),
        "rollout.placement",
        "0.2",
        lambda enabled: _by_flag(enabled, "histopipe", "even"),
        "`enabled: false` is now `placement: even`",
    ),
)
"""Renamed settings, all names dotted."""

REMOVED: dict[str, Removed] = {
    f"{section}.profile": Removed(
        None, "there is one profile for the whole run. Set `profile` without a section"
    )
    for section in ("drafting", "specactor", "histopipe", "pat")
} | {
    "pat.rule": Removed(
        "forecast", "GPUs switch when the lengths of the last epoch predict a gain"
    ),
    "pat.lengths": Removed("history", "a response is expected to be as long as in the last epoch"),
    "pat.opening": Removed("best", "steps begin in the TP degree that is predicted to be fastest"),
    "pat.waits": Removed(True, "refrain always considers whether to switch later"),
    "pat.kv": Removed("auto", "refrain moves or recomputes, whichever it predicts to be faster"),
    "pat.parked_weights": Removed("auto", "parked engines keep their weights if there is room"),
    "pat.switch_s": Removed(0.5, "refrain measures it"),
    "pat.kv_bytes_per_s": Removed(2e9, "refrain measures it"),
    "specactor.ladder": Removed(
        True, "with a profile, steps begin with the fastest drafter. Name one in specactor.drafter"
    ),
    "specactor.expected_acceptance": Removed(0.7, "`split_gpus` assumes 0.7"),
    "specactor.coupled": Removed(
        False, "models draft ahead, except where the profile shows that it does not pay"
    ),
    "specactor.shared_noise": Removed(True, "draft models always share the noise of the response"),
    "specactor.fuse": Removed(True, "the draft with more expected accepted tokens is verified"),
    "specactor.reconfigure_tokens": Removed(1000, "windows are chosen every 1000 tokens"),
    "specactor.max_race_batch": Removed(8, "an engine races 8 responses at the same time"),
    "specactor.race_kv_tokens": Removed(2048, "the KV cache is copied where that is faster"),
    "specactor.gpu_memory_share": Removed(0.9, "a drafter uses 0.9 of its own GPU"),
    "specactor.max_restarts": Removed(3, "a drafter is restarted 3 times"),
    "histopipe.two_tier": Removed(
        True, "ranking groups with long responses get more engines where times are known"
    ),
    "drafting.min_match": Removed(2, "matches have 2 to 16 tokens"),
    "drafting.max_match": Removed(16, "matches have 2 to 16 tokens"),
    "drafting.window": Removed("goodput", "a step verifies as many draft tokens as pay"),
    "drafting.siblings": Removed(False, "running samples of a prompt do not draft for each other"),
    "drafting.shared_tokens": Removed(2**20, "all prompts share an index of 1,048,576 tokens"),
    "drafting.look_ahead": Removed(True, "drafts always use the noise of their sample"),
    "drafting.foresee": Removed(True, "drafts always use the noise of their sample"),
    "drafting.gate": Removed(True, "only drafts that pay are verified. `refrain bench` compares"),
    "drafting.max_index_bytes": Removed(
        64 * 2**30, "indexes take up to half of their disk, at most 64 GiB. See drafting.index_dir"
    ),
    "drafting.plain_share": Removed(1 / 16, "it is 1/16 without a profile, and 0 with one"),
    "drafting.index_cpus": Removed(None, "indexes are built by a quarter of each node's cores"),
    "data.max_samples": Removed(
        None,
        "set max_steps for a trial, or name a file with fewer rows in data.train",
        OnResume.KEPT,
    ),
    "data.locale": Removed(None, _LOCALE),
    "reward.max_processes": Removed(None, "call resource.setrlimit in your function"),
    "reward.max_file_bytes": Removed(None, "call resource.setrlimit in your function"),
    "reward.max_retries": Removed(8, "`on_error: retry` scores a response up to 8 times again"),
    "experiment": Removed("refrain", "set the environment variable MLFLOW_EXPERIMENT_NAME"),
    "rollout.max_restarts": Removed(
        3, "an engine is restarted 10 times, a drafter 3 times. trainer.max_failures counts crashes"
    ),
    "rollout.start_timeout_s": Removed(
        3000.0, "a start may take five times `rollout.stall_timeout_s`. Raise that"
    ),
    "rollout.metrics": Removed(True, "vLLM's metrics are exported if RAY_ADDRESS names a cluster"),
    "trainer.adam_beta1": Removed(0.9, "it is 0.9. Change adam_beta2 instead", OnResume.KEPT),
    "trainer.reshard": Removed(True, "gathered weights are freed after each micro-batch"),
    "trainer.max_skipped_updates": Removed(3, "more than three skipped updates in a row end a run"),
    "algorithm.importance_ratio": Removed(
        "token",
        "the type picks it. Set `algorithm.type: gspo` for that of the sequence",
        OnResume.KEPT,
        {"gspo": "sequence"},
    ),
    "algorithm.baseline": Removed(
        "group_mean",
        "the type picks it. Set `algorithm.type: rloo` to leave one out",
        OnResume.KEPT,
        BASELINES,
    ),
    "histopipe.num_ranking_groups": Removed(
        None, "there is a group for every four engines, from 2 to 16"
    ),
    "histopipe.migrate": Removed(
        True, "`histopipe.last_share: 0` moves no response", OnResume.KEPT
    ),
    "histopipe.defer_share": Removed(
        0.25, "the longest quarter of the groups defers", OnResume.KEPT
    ),
}
"""Removed settings by dotted name."""


def accept_renamed(values: Mapping[str, Any], version: str = VERSION) -> dict[str, Any]:
    """Return the values of a config under their current names.

    Warn with OldNameWarning for each old name that this version still accepts. Raise ValueError,
    with a line for each problem, for older names, removed settings, and a setting that has its old
    and its new name.
    """
    accepted, refused = [], []
    for renamed, old in _old_names(values):
        if _has(values, renamed.new):
            refused.append(f"{old} is the old name of {renamed.new}: give the new one only")
        elif _minor(version) > _minor(renamed.since):
            refused.append(renamed.message(old))
        else:
            accepted.append(f"{renamed.message(old)}. refrain {_next(renamed)} refuses it")
    refused += [
        f"{name} is gone: {removed.advice}. Leave it out"
        for name, removed in REMOVED.items()
        if _has(values, name)
    ]
    if refused:
        raise ValueError("\n    ".join(refused))
    for message in accepted:
        warnings.warn(message, OldNameWarning, stacklevel=2)
    return _renamed(values)


def current_settings(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run's recorded config with current names, without removed settings."""
    values = _renamed(recorded)
    for name in REMOVED:
        if _has(values, name):
            del _section(values, name)[_last(name)]
    return values


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    found = _copied(values)
    for renamed in RENAMED:
        olds = [old for old in renamed.old if _has(found, old)]
        given = {_last(old): _section(found, old).pop(_last(old)) for old in olds}
        if given:
            (first, *_) = given.values()
            new = renamed.convert(**given) if renamed.convert else first
            _section(found, renamed.new).setdefault(_last(renamed.new), new)
    return found


def _old_names(values: Mapping[str, Any]) -> Iterator[tuple[Renamed, str]]:
    """Yield the old names that the values have."""
    for renamed in RENAMED:
        for old in renamed.old:
            if _has(values, old):
                yield renamed, old


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _next(renamed: Renamed) -> str:
    major, minor = _minor(renamed.since)
    return f"{major}.{minor + 1}"


def removed_changes(recorded: Mapping[str, Any]) -> Iterator[SettingChange]:
    """Yield the removed settings that had another value in a run's recorded config."""
    algorithm = recorded.get("algorithm", {}).get("type", "grpo")
    for name, removed in REMOVED.items():
        if _has(recorded, name):
            before = _section(recorded, name)[_last(name)]
            after = removed.by_type.get(algorithm, removed.value)
            if before != after:
                yield SettingChange(
                    name=name, before=before, after=after, on_resume=removed.on_resume
                )


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copied(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }


def _has(values: Mapping[str, Any], name: str) -> bool:
    for part in name.split(".")[:-1]:
        inner = values.get(part)
        if not isinstance(inner, Mapping):
            return False
        values = inner
    return _last(name) in values


def _section(values: Any, name: str) -> Any:
    """Return the section of a setting; add it if it is missing or empty. Raise ValueError when
    something else has its name."""
    for part in name.split(".")[:-1]:
        if values.get(part) is None:
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            raise ValueError(f"{part} is a section: give its settings, for example {name}")
    return values


def _last(name: str) -> str:
    return name.rpartition(".")[2]
