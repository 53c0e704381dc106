"""An algorithm's type picks its settings. Given settings override them."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from refrain.schemas.algorithm import SETTINGS, AlgorithmConfig
from refrain.schemas.config import TrainConfig
from refrain.schemas.resume import OnResume, changed_settings
from refrain.schemas.rollout import Split
from refrain.schemas.secret import fill_in, secrets_of
from refrain.schemas.trainer import TrainerConfig


def train_config(**values: object) -> TrainConfig:
    required = {"model": {"path": Path("model")}, "data": {"train": ["data"]}}
    return TrainConfig.model_validate(required | values)


BASELINE = {
    "rloo": ("leave_one_out", "k3"),
    "reinforce_plus_plus": ("none", "k2"),
    "reinforce_plus_plus_baseline": ("group_mean", "k2"),
    "opo": ("length_weighted", "k3"),
    "areal": ("none", "k3"),
}
EFFECTIVE = {
    "grpo": (0.2, 0.2, "clipped", "group", "token_mean", False, None),
    "dapo": (0.2, 0.28, "clipped", "group", "token_mean", True, None),
    "dr_grpo": (0.2, 0.2, "clipped", "none", "fixed_length", False, None),
    "gspo": (3e-4, 4e-4, "gspo", "group", "sequence_mean", False, 2.0),
    "rloo": (0.2, 0.2, "clipped", "none", "fixed_length", False, None),
    "reinforce_plus_plus": (0.2, 0.2, "clipped", "batch", "token_mean", False, None),
    "reinforce_plus_plus_baseline": (0.2, 0.2, "clipped", "batch", "token_mean", False, None),
    "cispo": (1.0, 4.0, "cispo", "group", "token_mean", False, None),
    "sapo": (0.2, 0.2, "sapo", "group", "sequence_mean", False, None),
    "gmpo": (0.3297, 0.4918, "gmpo", "group", "sequence_mean", False, None),
    "dppo": (0.2, 0.2, "dppo", "none", "fixed_length", False, None),
    "maxrl": (0.2, 0.2, "clipped", "mean", "fixed_length", False, None),
    "reinforce": (0.2, 0.2, "reinforce", "none", "fixed_length", False, None),
    "opo": (0.2, 0.2, "reinforce", "none", "fixed_length", False, None),
    "icepop": (0.2, 0.2, "clipped", "group", "sequence_mean", False, 5.0),
    "areal": (0.2, 0.2, "clipped", "batch", "token_mean", False, 5.0),
}


@pytest.mark.parametrize("name", EFFECTIVE)
def test_a_type_has_its_papers_settings(name: str) -> None:
    config = AlgorithmConfig.model_validate({"type": name})
    assert EFFECTIVE[name] == (
        config.clip_low,
        config.clip_high,
        config.policy_loss,
        config.scale_rewards,
        config.loss_aggregation,
        config.dynamic_sampling,
        config.tis_cap,
    )
    assert (config.kl_coefficient, config.overlong_buffer_tokens) == (0.0, 0)
    assert (config.baseline, config.kl_estimator) == BASELINE.get(name, ("group_mean", "k3"))


@pytest.mark.parametrize("name", SETTINGS)
def test_given_settings_override_those_of_the_type(name: str) -> None:
    own = {"sapo": {"tau_neg": 2.0}, "dppo": {"max_divergence": 0.2}}
    given = {"dynamic_sampling": name != "dapo", "loss_aggregation": "token_mean"}
    given |= own.get(name, {} if name in ("reinforce", "opo") else {"clip_high": 0.5})
    config = AlgorithmConfig.model_validate({"type": name} | given)
    assert {field: getattr(config, field) for field in given} == given


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_stored_config_holds_the_effective_values(name: str, staleness: int) -> None:
    config = train_config(staleness=staleness, algorithm={"type": name, "kl_coefficient": 0.5})
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
    stored = config.model_dump(mode="json")["algorithm"]
    assert stored["clip_high"] == EFFECTIVE[name][1]
    assert stored["tis_cap"] == EFFECTIVE[name][-1]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_form_that_sends_its_defaults_picks_no_setting(name: str, staleness: int) -> None:
    fields = AlgorithmConfig.model_json_schema()["properties"]
    defaults = {field: about["default"] for field, about in fields.items() if "default" in about}
    sent = train_config(staleness=staleness, algorithm=defaults | {"type": name})
    assert sent.algorithm == train_config(staleness=staleness, algorithm={"type": name}).algorithm
    trainer = TrainerConfig.model_json_schema()["properties"]["minibatches_per_step"]
    assert trainer["default"] is None, "a form that sends a default would count as a given value"
    assert TrainConfig.model_json_schema()["properties"]["algorithm"]["default"] == {}


def test_a_pipelined_run_has_the_loss_of_a_synchronous_one() -> None:
    assert train_config(staleness=1).algorithm == train_config().algorithm
    assert train_config(staleness=1).algorithm == AlgorithmConfig()


def test_the_overlong_buffer_is_below_the_limit() -> None:
    data = {"train": ["data"], "max_response_tokens": 100}
    train_config(data=data, algorithm={"overlong_buffer_tokens": 99})
    with pytest.raises(ValidationError, match=r"overlong_buffer_tokens \(100\) is not below"):
        train_config(data=data, algorithm={"overlong_buffer_tokens": 100})


def test_gspo_has_four_minibatches_by_default() -> None:
    gspo = {"type": "gspo"}
    assert train_config(algorithm=gspo).num_minibatches == 4
    assert train_config(algorithm=gspo, prompts_per_step=3).num_minibatches == 3
    assert train_config(algorithm=gspo, trainer={"minibatches_per_step": 1}).num_minibatches == 1
    assert train_config().num_minibatches == 1
    stored = train_config(algorithm=gspo).model_dump_json()
    assert TrainConfig.model_validate_json(stored).num_minibatches == 4


def test_a_decay_has_an_end_below_its_beginning() -> None:
    TrainerConfig.model_validate({"decay": "cosine", "decay_steps": 9})
    with pytest.raises(ValidationError, match="decay is cosine and decay_steps is not given"):
        TrainerConfig.model_validate({"decay": "cosine"})
    with pytest.raises(
        ValidationError, match=r"min_learning_rate \(0.1\) is above trainer.learning_rate"
    ):
        TrainerConfig.model_validate({"min_learning_rate": 0.1})


def test_validations_have_a_sampling_of_their_own_where_one_is_given() -> None:
    given = {"temperature": 0.7, "top_k": 5}
    plain = train_config(rollout=given).rollout
    assert plain.sampling(Split.VALIDATION).temperature == 0.7
    own = train_config(rollout=given | {"validation": {"temperature": 0.0}}).rollout
    found = [own.sampling(split) for split in (Split.TRAIN, Split.VALIDATION)]
    assert [(one.temperature, one.top_p, one.top_k) for one in found] == [
        (0.7, 1.0, 5),
        (0.0, 1.0, 0),
    ]


@pytest.mark.parametrize("type_", ["ppo", ["grpo"], None])
def test_another_algorithm_is_refused(type_: object) -> None:
    with pytest.raises(ValidationError, match="'grpo', 'dapo', 'dr_grpo', 'gspo', 'rloo'"):
        train_config(algorithm={"type": type_})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "sapo", "clip_high": 0.3}, "clip_high does nothing with algorithm.type=sapo"),
        ({"type": "cispo", "dual_clip": 3.0}, "dual_clip does nothing with algorithm.type=cispo"),
        ({"tau_pos": 2.0}, r"tau_pos does nothing with algorithm.type=grpo: .*\(sapo\)"),
        ({"max_divergence": 0.1}, r"max_divergence does nothing .*\(dppo\)"),
        ({"type": "dppo", "tis_cap": 2.0}, "tis_cap: dppo measures"),
        ({"tis_floor": 0.5}, "tis_floor: only the masks"),
        ({"tis_floor": 0.5, "tis_cap": 2.0}, "tis_floor: only the masks"),
        ({"type": "icepop", "tis_floor": 6.0}, r"tis_floor \(6.0\) is not below tis_cap"),
        ({"tis_cap": 0.9, "tis_mode": "token_mask"}, r"tis_cap \(0.9\) is not above 1"),
        ({"type": "maxrl", "overlong_buffer_tokens": 9}, "make rewards negative"),
        ({"type": "maxrl", "reward_kl_coefficient": 0.1}, "make rewards negative"),
        ({"type": "rloo", "scale_rewards": "mean"}, "another baseline than the group's mean"),
        ({"type": "opo", "scale_rewards": "group"}, "opo has no deviation of the group"),
        ({"reward_weight": 1.0}, "reward_weight does nothing without a teacher"),
        ({"teacher": "t", "kl_coefficient": 0.1}, "holds one model beside the policy"),
        (
            {"teacher": "http://host:8000/v1"},
            "is an address: set algorithm.teacher_server.urls to it",
        ),
        ({"teacher": "t", "type": "gmpo"}, "gmpo has one ratio for a response"),
        (
            {"teacher": "t", "type": "dapo"},
            "groups of equal rewards, which dynamic_sampling leaves",
        ),
    ],
)
def test_settings_that_cannot_act_together_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig.model_validate(given)


SERVER = {"urls": "http://host:8000/v1", "model": "big"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teacher": "t"}, "teacher and algorithm.teacher_server are two teachers"),
        ({"type": "gspo"}, "teacher_server gives each token an advantage .* gspo has one ratio"),
        ({"type": "dapo"}, "teacher_server also learns from groups of equal rewards"),
        ({"teacher_server": SERVER | {"urls": []}}, "teacher_server.urls"),
        ({"teacher_server": SERVER | {"urls": "host:8000"}}, "'host:8000' is no address of a serv"),
        ({"teacher_server": SERVER | {"urls": "ftp://host/v1"}}, "is no address of a server"),
        ({"teacher_server": SERVER | {"urls": "http:///v1"}}, "is no address of a server"),
        ({"teacher_server": SERVER | {"urls": "http://a b/v1"}}, "is no address of a server"),
        ({"teacher_server": SERVER | {"urls": "http://host:port"}}, "is no address \\("),
        ({"teacher_server": SERVER | {"urls": "http://[host/v1"}}, "is no address \\("),
        ({"teacher_server": SERVER | {"urls": "http://host/v1?a=1"}}, "goes on after its path"),
        ({"teacher_server": SERVER | {"api_key": ""}}, "api_key is empty"),
        ({"teacher_server": SERVER | {"api_key": "two\nlines"}}, "api_key is empty, or has"),
        ({"teacher_server": SERVER | {"model": ""}}, "teacher_server.model"),
        ({"teacher_server": SERVER | {"retries": -1}}, "teacher_server.retries"),
        ({"teacher_server": SERVER | {"timeout_s": 0}}, "teacher_server.timeout_s"),
    ],
)
def test_a_teacher_on_a_server_that_cannot_be_asked_is_refused(given: dict, message: str) -> None:
    AlgorithmConfig.model_validate({"teacher_server": SERVER, "kl_coefficient": 0.1})
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig.model_validate({"teacher_server": SERVER} | given)


def test_an_address_keeps_its_secrets() -> None:
    secret = SERVER | {"urls": "http://me:hush@host:8000/v1"}
    with pytest.raises(ValidationError, match="'host:8000/v1' has credentials") as error:
        AlgorithmConfig.model_validate({"teacher_server": secret})
    assert "hush" not in error.value.errors()[0]["msg"]
    config = train_config(algorithm={"teacher_server": SERVER | {"api_key": "hush"}})
    assert "hush" not in config.model_dump_json()
    stored = fill_in(config.model_dump(mode="json"), secrets_of(config))
    assert TrainConfig.model_validate(stored) == config


def test_a_server_scores_at_temperature_1() -> None:
    algorithm = {"teacher_server": SERVER}
    assert not train_config(algorithm=algorithm).algorithm.needs_reference
    with pytest.raises(ValidationError, match=r"temperature 1, and rollout.temperature is 0.7"):
        train_config(algorithm=algorithm, rollout={"temperature": 0.7})
    train_config(algorithm={"teacher": "t"}, rollout={"temperature": 0.7})


def test_a_resumed_run_may_find_its_teacher_elsewhere() -> None:
    moved = SERVER | {"urls": ["http://other:8000/v1"], "api_key": "k", "retries": 2, "at_once": 1}
    before, after, other = (
        train_config(algorithm={"teacher_server": one}) if one else train_config()
        for one in (SERVER, moved, None)
    )
    assert {one.on_resume for one in changed_settings(before, after)} == {OnResume.FREE}
    assert OnResume.KEPT in {one.on_resume for one in changed_settings(before, other)}


def test_a_kl_in_the_rewards_needs_whole_groups() -> None:
    algorithm = {"reward_kl_coefficient": 0.1}
    assert train_config(algorithm=algorithm).algorithm.needs_reference
    with pytest.raises(ValidationError, match="reward_kl_coefficient needs whole groups"):
        train_config(algorithm=algorithm, staleness=1)


@pytest.mark.parametrize(
    "algorithm", [{"tis_cap": 2.0}, {"type": "areal"}, {"type": "dppo"}, {"file": "mine.py"}]
)
def test_very_stale_tokens_need_a_loss_for_them(algorithm: dict[str, float | str]) -> None:
    assert train_config(staleness=2).staleness == 2
    with pytest.raises(ValidationError, match=r"staleness=3: .*tis_cap=2"):
        train_config(staleness=3)
    assert train_config(algorithm=algorithm, staleness=16).staleness == 16
