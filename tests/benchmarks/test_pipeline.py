"""The pipeline bench computes its figures from made-up runs. Runs that fail show their output."""

import os
import signal
import subprocess
import sys
from ast import literal_eval
from statistics import median

import pytest

from refrain.benchmarks import cores, pipeline
from refrain.benchmarks.pipeline import COMPARED, MODES, overrides, run_command, stretch_row
from refrain.flows.bench import launch_bench
from refrain.flows.config_file import load_config
from refrain.schemas.bench import BenchReport
from refrain.schemas.step import StepReport
from tests.conftest import DEMO

CONFIG = str(DEMO / "train.yaml")


def step(number, epoch, step_s, busy_s=6.0, num_migrated=0, num_deferred=0):
    return StepReport(
        step=number,
        epoch=epoch,
        reward_mean=0.5,
        metrics={
            "rollout/busy_s": busy_s,
            "rollout/num_migrated": float(num_migrated),
            "rollout/num_deferred": float(num_deferred),
        },
        timing_s=dict.fromkeys(pipeline.PHASES, 3.0) | {"step": step_s, "sync": 0.25},
    )


STEPS = [
    step(1, 0, 50.0, 80.0, 9, 9),
    step(2, 0, 10.0),
    step(3, 1, 8.0),
    step(4, 1, 8.0, 7.0, 2, 1),
    step(5, 1, 50.0, 80.0, 9, 9),
]
"""Only steps 3 and 4 count: the first epoch and the last step are left out."""
LENGTHS = {1: [999] * 4, 2: [999] * 4, 3: [10, 30], 4: [10, 20, 30, 20], 5: [999] * 4}


def row(mode, samples_per_s, num_engines=2, lap=1, idle_share=0.5):
    return {
        "lap": lap,
        "engines": num_engines,
        "mode": mode,
        "mode_order": [*MODES],
        "samples_per_s": samples_per_s,
        "idle_share": idle_share,
        "cores_busy": 0.75,
        "step_s": 1.0,
        "mean_response_tokens": 100.0,
        "num_migrated": 3,
        "num_deferred": 1,
        "validation_last": 0.5,
        "process_s": 120.0,
    }


def test_time_between_steps_counts():
    """Step 2 ends at 170 s. Step 3 is planned 2 s after that, and step 4 is planned 4 s after
    step 3 has ended."""
    found = stretch_row(STEPS, {1: 100.0, 2: 160.0, 3: 172.0, 4: 184.0, 5: 200.0}, LENGTHS, 2)
    assert found["stretch_s"] == 2.0 + 8.0 + 4.0 + 8.0
    assert found["samples_per_s"] == 6 / 22
    assert found["step_s"] == 11.0
    assert found["idle_share"] == pytest.approx(1 - 13 / (2 * 22))


def test_steps_that_are_planned_early_add_up():
    found = stretch_row(STEPS, {1: 100.0, 2: 101.0, 3: 102.0, 4: 165.0, 5: 166.0}, LENGTHS, 2)
    assert found["stretch_s"] == 16.0
    assert found["idle_share"] == pytest.approx(1 - 13 / (2 * 16))


def test_the_first_epoch_does_not_count():
    found = stretch_row(STEPS, {1: 100.0, 2: 101.0, 3: 102.0, 4: 165.0, 5: 166.0}, LENGTHS, 2)
    assert (found["num_steps"], found["num_samples"]) == (2, 6)
    assert found["mean_response_tokens"] == 20.0
    assert (found["num_migrated"], found["num_deferred"]) == (2, 1)
    assert (found["sync_s"], found["train_s"]) == (0.5, 6.0)


def test_the_modes_differ_in_nothing_else(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text((DEMO / "train.yaml").read_text() + "drafting: {index_dir: /dev/shm}\n")
    configs = {mode: load_config(path, overrides(mode, 3, 5)) for mode in MODES}
    assert [config.staleness for config in configs.values()] == [0, 1, 1, 1, 0, 2, 4]
    ranked = [mode for mode, config in configs.items() if config.ranks_prompts]
    assert ranked == ["histopipe"]
    different = {"staleness", "rollout", "algorithm"}
    (same,) = {config.model_dump_json(exclude=different) for config in configs.values()}
    assert same
    config = configs["sync"]
    assert (config.rollout.num_engines, config.num_epochs) == (3, 5)
    assert config.history_dir.is_relative_to(config.run_dir.absolute())


@pytest.mark.parametrize(
    ("cores", "of_sync", "of_a_pipeline"),
    [
        ({}, 2, 2),
        ({"shares_cores": True}, 2, 1),
        ({"shares_cores": True, "split_cores": True}, 1, 1),
    ],
)
def test_threads_of_the_trainer(cores, of_sync, of_a_pipeline):
    configs = {
        mode: load_config(DEMO / "train.yaml", overrides(mode, 2, 2, **cores)) for mode in MODES
    }
    for config in configs.values():
        assert config.trainer.num_threads == (of_a_pipeline if config.staleness else of_sync)


def test_figures_are_medians_and_ratios_of_medians():
    speeds = {"sync": (10, 12, 50), "pipelined": (15, 1, 18), "histopipe": (24, 90, 6)}
    rows = [
        row(mode, speed, n, idle_share=speed / 100)
        for n in (4, 2)
        for mode, own in speeds.items()
        for speed in (s * n for s in own)
    ]
    found = pipeline.figures(rows, [4, 2])
    assert median(speeds["sync"]) == 12
    assert found["sync_samples_per_s"] == found["sync_samples_per_s_4_engines"] == 48
    assert found["sync_samples_per_s_2_engines"] == 24
    assert found["pipelined_speedup"] == 15 / 12
    assert found["histopipe_speedup_2_engines"] == 2.0
    assert found["idle_share_histopipe_2_engines"] == 0.48
    assert {name for name in found if not name.endswith("_engines")} == {
        "sync_samples_per_s",
        "pipelined_speedup",
        "histopipe_speedup",
        *(f"{name}_{mode}" for name in ("idle_share", "cores_busy") for mode in speeds),
    }
    assert len(found) == 3 * 9


def test_a_lap_is_every_count_in_every_mode(monkeypatch, capsys, tmp_path):
    calls = []

    def run_once(config, mode, num_engines, num_epochs, settings, seed, split_cores):
        calls.append((num_engines, mode))
        assert not split_cores
        assert seed == (len(calls) - 1) // 8
        assert (str(config), num_epochs, settings) == (CONFIG, 2, ["algorithm.type=dapo"])
        return row(mode, 10.0 + len(calls), num_engines)

    monkeypatch.setattr(pipeline, "run_once", run_once)
    monkeypatch.setenv("COLUMNS", "150")
    file = tmp_path / "found.json"
    arguments = [CONFIG, "--engines=4,1", "--laps=2", "--epochs=2", "--set", "algorithm.type=dapo"]
    launch_bench("pipeline", [*arguments, f"--json={file}"])
    names = [*COMPARED]
    assert [call[1] for call in calls] == [*names * 2, *[*names[1:], names[0]] * 2]
    assert [call[0] for call in calls] == [4, 4, 4, 4, 1, 1, 1, 1] * 2
    report = BenchReport.model_validate_json(file.read_text())
    assert report.command == f"refrain bench pipeline {' '.join(arguments)}"
    assert len(report.rows) == 16
    printed = capsys.readouterr().out
    assert "1 engines, sync: 26.0 samples/s, 50% idle, in 120 s; 0 runs left" in printed
    assert "1 engines, queue: 18.0 samples/s, 50% idle, in 120 s; 8 runs left, about 16" in printed
    assert "idle cores s/step migrated deferred tokens reward" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([CONFIG, "--engines", "0"], "--engines 0: give at least 1 each"),
        ([CONFIG, "--set", "algorithm.type=x"], "algorithm.type: Input should be"),
        ([CONFIG, "--engines", "2,-1"], "--engines 2,-1: give at least 1 each"),
        ([CONFIG, "--engines", "2,,4"], "'2,,4' must list numbers, for example 2,4"),
        ([CONFIG, "--laps", "0"], "--laps 0: give at least 1"),
        ([CONFIG, "--modes", "histopipe"], "--modes histopipe: give sync, and what to compare it"),
        ([CONFIG, "--modes", "sync,async"], "--modes sync,async: give sync, and .* of sync, pip"),
        ([CONFIG, "--epochs", "1"], "--epochs 1: give at least 2: the first one is the warm-up"),
        (["no/where.yaml"], "no config file at no/where.yaml: give the path of a YAML file"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(monkeypatch, arguments, message):
    monkeypatch.delattr(pipeline, "run_once")
    with pytest.raises(ValueError, match=message):
        launch_bench("pipeline", arguments)


def test_a_run_that_fails_shows_what_it_printed_last(monkeypatch):
    code = "import sys; print(*range(90), sep='\\n'); sys.exit('no such model')"
    monkeypatch.setattr(pipeline, "COMMAND", (sys.executable, "-c", code))
    with pytest.raises(RuntimeError, match=r"staleness=0 .* ended with 1") as failure:
        launch_bench("pipeline", [CONFIG])
    lines = str(failure.value).splitlines()
    assert "no such model" in lines
    assert "89" in lines
    assert "9" not in lines


def burns(seconds, before="", after=""):
    """Return code that uses one core for this many seconds."""
    burn = f"while time.process_time() < {seconds}: pass"
    return f"import os, subprocess, sys, time\n{before}\n{burn}\n{after}"


def test_cores_that_processes_use_are_counted(tmp_path, monkeypatch):
    """A process uses a core for 1 s and its child for half a second. Then the process sleeps.

    The watch misses CPU time of an ended process after the last look at it.
    """
    monkeypatch.setattr(cores, "LOOK_S", 0.1)
    child = f"child = subprocess.Popen([sys.executable, '-c', {burns(0.5)!r}])"
    watch = run_command(
        [sys.executable, "-c", burns(1, child, "child.wait(); time.sleep(1)")], tmp_path
    )
    (first_s, before_s), (last_s, used_s) = watch._seen[0], watch._seen[-1]
    assert 1.2 < used_s < 2.0
    assert watch.used_s(first_s, last_s) == pytest.approx(used_s - before_s)
    assert watch.used_s(last_s - 0.5, last_s) < 0.3


def test_the_trainer_has_cores_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "LOOK_S", 0.1)
    told = "print(os.sched_getaffinity(0))"
    trainer = ["ray::TrainerActor.train_step", "-c", burns(0.8, "", told)]
    code = burns(0, f"subprocess.run({trainer!r}, executable=sys.executable)", told)
    run_command([sys.executable, "-u", "-c", code], tmp_path, split_cores=True)
    of_trainer, of_others = map(literal_eval, (tmp_path / "output.txt").read_text().splitlines())
    assert of_trainer
    assert not of_trainer & of_others
    assert of_trainer | of_others == os.sched_getaffinity(0)


def test_one_core_is_not_split(monkeypatch):
    """The error comes before any run starts."""
    monkeypatch.delattr(pipeline, "run_once")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(ValueError, match="needs at least 2 cores: there is 1"):
        launch_bench("pipeline", [CONFIG, "--split-cores"])


def test_a_run_stops_with_the_bench(tmp_path, monkeypatch):
    """The bench is interrupted while it waits for the run."""
    started = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            if self not in started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path)
    assert started[0].returncode == -signal.SIGTERM
