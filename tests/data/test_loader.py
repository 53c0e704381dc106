"""The loader visits each prompt once an epoch, in an order that a restart repeats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.data.loader import PromptLoader


def make_loader(num_prompts=10, prompts_per_step=4, num_epochs=3, shuffle=True, seed=0):
    return PromptLoader(
        [f"p{i}" for i in range(num_prompts)],
        prompts_per_step=prompts_per_step,
        num_epochs=num_epochs,
        shuffle=shuffle,
        seed=seed,
    )


@given(
    num_prompts=st.integers(1, 40),
    prompts_per_step=st.integers(1, 50),
    num_epochs=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_epoch_visits_each_prompt_once(
    num_prompts, prompts_per_step, num_epochs, shuffle, seed
):
    loader = make_loader(num_prompts, prompts_per_step, num_epochs, shuffle, seed)
    visited: dict[int, list[str]] = {epoch: [] for epoch in range(num_epochs)}
    for step in range(1, loader.num_steps + 1):
        prompts = loader.prompts_of(step)
        assert 1 <= len(prompts) <= prompts_per_step
        visited[loader.epoch_of(step)].extend(prompts)
    for prompts in visited.values():
        assert sorted(prompts) == sorted(f"p{i}" for i in range(num_prompts))


@pytest.mark.parametrize(("max_steps", "num_steps"), [(None, 9), (4, 4), (9, 9), (50, 9)])
def test_a_run_ends_after_its_steps_or_its_epochs(max_steps: int | None, num_steps: int) -> None:
    def loader(max_steps: int | None) -> PromptLoader:
        keys = [f"p{i}" for i in range(10)]
        return PromptLoader(
            keys, prompts_per_step=4, num_epochs=3, shuffle=True, seed=0, max_steps=max_steps
        )

    assert loader(max_steps).num_steps == num_steps
    assert loader(max_steps).prompts_of(4) == loader(None).prompts_of(4)
    with pytest.raises(ValueError, match=f"whose steps are 1..{num_steps}$"):
        loader(max_steps).epoch_of(num_steps + 1)
    loader(max_steps).check_state(loader(None).state(3))


def test_resuming_at_an_epoch_boundary_skips_nothing():
    whole = make_loader()
    assert whole.steps_per_epoch == 3
    for last_step in (2, 3, 4, 6):
        resumed = make_loader()
        resumed.check_state(whole.state(last_step))
        first = whole.state(last_step)["step"] + 1
        for step in range(first, whole.num_steps + 1):
            assert resumed.prompts_of(step) == whole.prompts_of(step)
    assert [whole.epoch_of(step) for step in (3, 4, 6, 7, 9)] == [0, 1, 1, 2, 2]


def test_steps_may_be_asked_in_any_order():
    loader = make_loader()
    forward = [loader.prompts_of(step) for step in range(1, 10)]
    backward = [make_loader().prompts_of(step) for step in range(9, 0, -1)]
    assert forward == backward[::-1]
    assert [loader.prompts_of(step) for step in (9, 1, 9)] == [forward[8], forward[0], forward[8]]


def test_the_last_step_of_an_epoch_takes_what_is_left():
    assert [len(make_loader().prompts_of(step)) for step in (1, 2, 3, 4)] == [4, 4, 2, 4]


def test_order_depends_on_seed_and_epoch_only_when_shuffled():
    def epoch(loader, number):
        steps = range(number * 3 + 1, number * 3 + 4)
        return [key for step in steps for key in loader.prompts_of(step)]

    plain = make_loader(shuffle=False)
    assert epoch(plain, 0) == epoch(plain, 1) == [f"p{i}" for i in range(10)]
    shuffled = make_loader()
    assert epoch(shuffled, 0) != epoch(shuffled, 1)
    assert epoch(shuffled, 0) != epoch(make_loader(seed=1), 0)


def test_the_order_is_the_same_in_every_release():
    assert make_loader(num_prompts=5).prompts_of(1) == ("p3", "p0", "p4", "p2")


@pytest.mark.parametrize("step", [0, -1, 10])
def test_a_step_outside_the_run_is_refused(step):
    for draw in (make_loader().prompts_of, make_loader().refills_of):
        with pytest.raises(ValueError, match=r"steps are 1\.\.9"):
            draw(step)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_prompts": 11}, "num_prompts"),
        ({"prompts_per_step": 5}, "prompts_per_step"),
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "shuffle"),
    ],
)
def test_a_resumed_run_must_have_the_same_data(change, name):
    with pytest.raises(ValueError, match=f"step 3 was made with {name} = "):
        make_loader(**change).check_state(make_loader().state(3))


def test_changed_prompts_are_noticed_and_more_epochs_are_not():
    state = make_loader().state(3)
    make_loader(num_epochs=5).check_state(state)
    other = PromptLoader(
        [f"q{i}" for i in range(10)], prompts_per_step=4, num_epochs=3, shuffle=True, seed=0
    )
    with pytest.raises(ValueError, match="prompts_hash"):
        other.check_state(state)


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match="no training prompts"):
        make_loader(num_prompts=0)


@given(
    num_prompts=st.integers(1, 40),
    prompts_per_step=st.integers(1, 50),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_step_can_draw_every_prompt_that_is_not_its_own(
    num_prompts, prompts_per_step, shuffle, seed
):
    """Only the seed and the step decide the order of the drawn prompts. Drawing does not change the
    step's own prompts."""
    loader = make_loader(num_prompts, prompts_per_step, shuffle=shuffle, seed=seed)
    again = make_loader(num_prompts, prompts_per_step, shuffle=shuffle, seed=seed)
    for step in range(loader.num_steps, 0, -1):
        own, more = loader.prompts_of(step), loader.refills_of(step)
        assert sorted((*own, *more)) == sorted(f"p{i}" for i in range(num_prompts))
        assert (again.prompts_of(step), again.refills_of(step)) == (own, more)


def test_refills_draw_prompts_of_no_nearby_step():
    loader = make_loader(num_prompts=40, prompts_per_step=4)
    drawn = []
    for step in range(1, loader.steps_per_epoch):
        first = loader.refills_of(step)[: loader.prompts_per_step]
        assert not set(first) & set(loader.prompts_of(step + 1))
        drawn += first
    assert len(set(drawn)) == len(drawn)
