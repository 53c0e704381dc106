"""The recorded machines and the recorded commit."""

import subprocess

from refrain.engines.tracking.environment import count_gpus, find_commit, find_environment


def test_gpus_are_counted_by_kind_over_the_nodes():
    nodes = [
        {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0},
        {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0},
        {"CPU": 8.0, "GPU": 1.0},
        {"CPU": 8.0},
    ]
    assert count_gpus(nodes) == {"H100": 8, "GPU": 1}


def test_an_environment_is_flat_for_mlflow():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0, "accelerator_type:L4": 1.0}},
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": False, "Resources": {"CPU": 99.0}},
    ]
    environment = find_environment(nodes)
    assert (environment.num_nodes, environment.num_cpus) == (2, 12)
    tags = environment.tags
    assert tags["environment.gpu"] == "2 x L4"
    assert tags["environment.num_nodes"] == "2"
    for package in ("python", "torch", "vllm", "ray", "prefect", "mlflow", "duckdb", "refrain"):
        assert tags[f"environment.{package}"]


def test_recorded_commit_marks_changed_files(tmp_path):
    def git(*command):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)

    assert find_commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "One")
    commit = find_commit(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert find_commit(tmp_path) == commit + "+"
