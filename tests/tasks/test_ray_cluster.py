"""Each test here starts its own Ray, or fakes one: imports of workers, free GPUs, Ray's death."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from refrain.engines.gpus.placement import GpuPlacement, Wanted
from refrain.tasks.run import ray_cluster
from tests.conftest import REPOSITORY
from tests.tasks import users_directory


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "how", "why"),
    [
        ("raylet", signal.SIGKILL, "its raylet was killed or crashed"),
        ("gcs_server", signal.SIGKILL, "its gcs_server was killed or crashed"),
        pytest.param(
            "node", signal.SIGKILL, "the node of the trainer is dead", marks=pytest.mark.slow
        ),
        pytest.param(
            "gcs_server", signal.SIGSTOP, "has not answered for 25 s", marks=pytest.mark.slow
        ),
    ],
)
def test_the_death_of_ray_ends_what_runs_within_half_a_minute(name, how, why):
    done = subprocess.run(
        [sys.executable, "-m", "tests.tasks.ray_death", name, str(int(how))],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"known_s"'))
    death = json.loads(line)
    assert death["known_s"] < 30.0
    assert why in death["told"]
    assert death["told"].endswith("Go on by --resume.")


@pytest.mark.engine
def test_packages_of_a_users_directory_are_not_taken_for_refrains(tmp_path):
    for name in users_directory.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('this one is mine')")
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r});"
        "from tests.tasks.users_directory import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=240.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    looked = json.loads(done.stdout.splitlines()[-1])
    assert all(Path(file).is_relative_to(REPOSITORY) for file in looked["files"])
    assert str(tmp_path) not in looked["path"]


class Watch:
    """A fake Ray watch. The test sets its answers."""

    died, gone, killed = "", "", False

    def kill(self):
        self.killed = True

    async def end_with_ray(self):
        await asyncio.sleep(60)

    def missing(self):
        return self.gone


@pytest.fixture
def watch(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(ray_cluster, "_RayWatch", lambda _: watch)
    return watch


@pytest.mark.usefixtures("watch")
async def test_an_error_of_the_block_is_its_own_while_ray_lives():
    with pytest.raises(ValueError, match="odd"):
        async with ray_cluster.while_ray_lives(""):
            raise ValueError("odd")


async def test_errors_caused_by_rays_death_name_it(watch):
    async def fail():
        async with ray_cluster.while_ray_lives("Do this"):
            watch.gone = "its raylet was killed"
            raise ValueError("actor died")

    with pytest.raises(ray_cluster.RayDied, match=r"its raylet was killed\. Do this") as raised:
        await fail()
    assert str(raised.value.__cause__) == "actor died"
    assert watch.killed


@pytest.mark.usefixtures("watch")
async def test_watch_ends_with_its_block():
    async with ray_cluster.while_ray_lives(""):
        before = len(asyncio.all_tasks())
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before - 1


def test_gpus_that_others_keep_are_noticed(monkeypatch):
    import ray
    from ray._private import state

    free = [1.0, 1.0, 3.0]

    def nodes(num):
        return {"a": {"GPU": num, "CPU": 4.0}, "b": {"CPU": 4.0}}

    monkeypatch.setattr(ray_cluster, "_init", lambda **_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 4.0})
    monkeypatch.setattr(state, "total_resources_per_node", lambda: nodes(4.0))
    monkeypatch.setattr(state, "available_resources_per_node", lambda: nodes(free[0]))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_cluster, "FREE_S", 0.0)

    def begin(gpus: int) -> GpuPlacement:
        wanted = [Wanted("the trainer", gpus, "trainer.num_processes", spreads=True)]
        with ray_cluster.ray_cluster("test", wanted) as placement:
            return placement

    with pytest.raises(ValueError, match=r"takes 5 GPUs .*, free are 4 by node") as refused:
        begin(5)
    assert "Other jobs" not in str(refused.value)
    with pytest.raises(ValueError, match=r"free are 1 by node.* Other jobs use"):
        begin(3)
    assert begin(1) == GpuPlacement(4, {"the trainer": ("a",)})
    # Another run ends while this one waits.
    monkeypatch.setattr(ray_cluster, "FREE_S", 60.0)
    monkeypatch.setattr(state, "available_resources_per_node", lambda: nodes(free.pop(0)))
    assert begin(3) == GpuPlacement(4, {"the trainer": ("a",) * 3})


HOLDER = """
import time
from refrain.engines.shared_memory import PrivateDir
print(PrivateDir().path, flush=True)
time.sleep(60)
"""


def test_files_of_ended_engines_are_cleared(tmp_path, monkeypatch):
    """Engines end some time after `ray.shutdown` returns, so the cleanup must wait for them."""
    import ray

    raylet = tmp_path / "raylet"
    raylet.symlink_to("/bin/sh")
    script = f"{sys.executable} -c '{HOLDER}' & echo $!; wait"
    with subprocess.Popen([raylet, "-c", script], stdout=subprocess.PIPE, text=True) as node:
        pid, held = (node.stdout.readline().strip() for _ in range(2))
        ending = threading.Timer(1.0, lambda: os.kill(int(pid), signal.SIGKILL))
        monkeypatch.setattr(ray_cluster, "_init", lambda **_: None)
        monkeypatch.setattr(ray, "cluster_resources", dict)
        monkeypatch.setattr(ray, "shutdown", ending.start)
        with ray_cluster.ray_cluster("test"):
            assert Path(held).is_dir()
        assert not Path(held).exists()


async def test_a_node_that_the_run_needs_is_missed_and_no_other(monkeypatch):
    alive = {"here": True, "trainer": True, "engine": True}
    context = SimpleNamespace(get_node_id=lambda: "here", gcs_address="head:1")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr(
        "ray.nodes", lambda: [{"NodeID": n, "Alive": lives} for n, lives in alive.items()]
    )
    watch = ray_cluster._RayWatch({"trainer": "trainer rank 0, 1"})
    alive["engine"] = False
    assert await watch._silent() == ""
    alive["trainer"] = False
    assert await watch._silent() == "the node of trainer rank 0, 1 is dead"
    del alive["here"]
    assert await watch._silent() == "the node of this machine, trainer rank 0, 1 is dead"


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_node_that_is_late_is_started_once_more(monkeypatch, tmp_path, num_failures):
    """Ray waits 30 s for its own processes. On a busy machine that may not be enough."""
    import ray

    starts = []

    def init(**options):
        starts.append(options)
        if len(starts) <= num_failures:
            raise Exception("The current node timed out during startup.")
        return SimpleNamespace(address_info={"session_dir": str(tmp_path)})

    monkeypatch.setattr(ray, "init", init)
    if num_failures == 1:
        assert ray_cluster._init(namespace="it") == tmp_path
    else:
        with pytest.raises(RuntimeError, match=r"in two tries: .*timed out during startup"):
            ray_cluster._init(namespace="it")
    assert len(starts) == 2


def test_another_error_of_ray_is_not_tried_again(monkeypatch):
    import ray

    starts = []

    def init(**options):
        starts.append(options)
        raise ConnectionError("no such cluster")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConnectionError):
        ray_cluster._init(namespace="it")
    assert len(starts) == 1
