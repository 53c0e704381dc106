"""Check the files of a cluster with their own tools and schemas, without starting anything."""

import os
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
import pytest
import yaml

from tests.conftest import REPOSITORY

CLUSTER = REPOSITORY / "infra" / "cluster"
KUBERNETES = CLUSTER / "kubernetes"
RAY_CLUSTER_SCHEMA = Path(__file__).parent / "raycluster.json"
SECRET = re.compile(r"PASSWORD|TOKEN|SECRET|ACCESS_KEY")
COMPOSE_FILES = ("compose.yaml", "compose.gpu.yaml", "compose.monitoring.yaml")
SCRIPTS = sorted((REPOSITORY / "infra").rglob("*.sh"))


def check_schema(*args: str | Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0, done.stdout + done.stderr


def check_manifest(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def manifests() -> list[dict[str, Any]]:
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    assert {*listed, "kustomization.yaml"} == {file.name for file in KUBERNETES.iterdir()}
    return [one for name in listed for one in yaml.safe_load_all((KUBERNETES / name).read_text())]


def ray_cluster() -> dict[str, Any]:
    return next(one for one in manifests() if one["kind"] == "RayCluster")


def pod_specs() -> list[dict[str, Any]]:
    return [template["spec"] for template in templates()]


def containers() -> list[dict[str, Any]]:
    return [container for spec in pod_specs() for container in spec["containers"]]


def names(kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in manifests() if one["kind"] == kind}


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_files_fit_the_compose_specification(name: str) -> None:
    check_schema("--builtin-schema", "vendor.compose-spec", CLUSTER / name)


def test_compose_publishes_on_loopback_by_default() -> None:
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert len(ports) == 2
    assert all(port.startswith("${BIND_ADDRESS:-127.0.0.1}:") for port in ports)
    assert not any("network_mode" in service for service in services.values())


def test_compose_wants_its_secrets_and_has_none() -> None:
    used = re.findall(r"\$\{(\w+)(:[?-])?", (CLUSTER / "compose.yaml").read_text())
    secrets = {name for name, _ in used if SECRET.search(name)}
    words = ("MLFLOW_PASSWORD", "POSTGRES_PASSWORD", "PREFECT_PASSWORD")
    assert secrets == {*words, "RAY_AUTH_TOKEN"}
    assert all((name, ":?") in used and (name, ":-") not in used for name in secrets)
    example = (CLUSTER / "example.env").read_text()
    assert re.findall(r"^(\w+)=(.*)$", example, re.MULTILINE) == [(s, "") for s in sorted(secrets)]


def test_compose_services_name_each_other() -> None:
    """Compose itself checks this, too, but its schema does not."""
    compose = yaml.safe_load((CLUSTER / "compose.yaml").read_text())
    services = compose["services"]
    for service in services.values():
        for dependency in service.get("depends_on", ()):
            assert "healthcheck" in services[dependency]
        assert set(service["networks"]) <= set(compose["networks"])
    assert set(yaml.safe_load((CLUSTER / "compose.gpu.yaml").read_text())["services"]) <= set(
        services
    )


@pytest.mark.parametrize(
    "resource",
    [one for one in manifests() if one["kind"] != "RayCluster"],
    ids=lambda one: f"{one['kind']}-{one['metadata']['name']}",
)
def test_manifests_fit_kubernetes_schemas(resource: dict[str, Any]) -> None:
    check_manifest(resource)


def test_the_ray_cluster_fits_kuberays_definition() -> None:
    check_schema("--schemafile", RAY_CLUSTER_SCHEMA, KUBERNETES / "ray.yaml")
    spec = ray_cluster()["spec"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        template = {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
        check_manifest(template)


def test_kubernetes_gets_secrets_from_secrets() -> None:
    env = [one for container in containers() for one in container.get("env", ())]
    secrets = [one for one in env if SECRET.search(one["name"])]
    assert len(secrets) == 10
    assert all(set(one) == {"name", "valueFrom"} for one in secrets)
    assert {one["valueFrom"]["secretKeyRef"]["name"] for one in secrets} == {"refrain"}
    assert "Secret" not in {one["kind"] for one in manifests()}


def test_no_secret_is_in_an_argument() -> None:
    """Every user of a machine can list the arguments of its processes."""
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"].values()
    for one in (*services, *containers()):
        arguments = [*one.get("command", ()), *one.get("args", ())]
        assert not [text for text in arguments if SECRET.search(text)]


def test_prefects_server_asks_and_its_worker_knows() -> None:
    compose = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    kubernetes = {one["name"]: one for one in containers()}
    for services in (compose, kubernetes):
        given = {name: environment(services[name]) for name in ("prefect", "worker")}
        word = given["prefect"]["PREFECT_SERVER_API_AUTH_STRING"]
        assert re.sub(r":\?[^}]*", "", word) == given["worker"]["PREFECT_API_AUTH_STRING"]
        assert "*" not in given["prefect"]["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]


def test_mlflows_server_asks_and_its_worker_knows() -> None:
    compose = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    kubernetes = {one["name"]: one for one in containers()}
    for services in (compose, kubernetes):
        assert "--app-name=refrain" in services["mlflow"]["command"]
        asked = environment(services["mlflow"])["REFRAIN_MLFLOW_AUTH_STRING"]
        user, _, word = re.sub(r":\?[^}]*", "", asked).partition(":")
        worker = environment(services["worker"])
        assert worker["MLFLOW_TRACKING_USERNAME"] == user == "refrain"
        # In Kubernetes, the password comes from the secret and has no value here.
        assert worker.get("MLFLOW_TRACKING_PASSWORD", "$(MLFLOW_PASSWORD)") == word


def test_mlflow_knows_its_public_page() -> None:
    """MLflow must allow its public host and also its origin, which a page's own requests name."""
    compose = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]["mlflow"]
    given = dict(text.split("=", 1) for text in compose["command"] if "=" in text)
    public = "${MLFLOW_PUBLIC_HOST:-localhost:5000}"
    assert public in given["--allowed-hosts"].split(",")
    origins = [f"http://{public}", f"https://{public}"]
    assert given["--cors-allowed-origins"].split(",") == origins


def environment(container: dict[str, Any]) -> dict[str, str]:
    """Return a container's environment, from compose's or Kubernetes's format."""
    given = container.get("environment") or container["env"]
    if isinstance(given, dict):
        return given
    return {one["name"]: one["value"] for one in given if "value" in one}


def test_nothing_runs_as_root() -> None:
    for service in yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"].values():
        assert service["user"] in ("${RUN_AS:-10001:10001}", "postgres")
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    for spec in pod_specs():
        given = spec["securityContext"]
        assert given["runAsNonRoot"]
        assert 0 not in (given["runAsUser"], given["runAsGroup"], given["fsGroup"])
        assert given["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_only_what_belongs_to_refrain_reaches_it_and_postgres_only_the_servers() -> None:
    pods = [template["metadata"]["labels"] for template in templates()]
    assert len(pods) == 6
    may_reach = {
        (pod.get("app"), other.get("app"))
        for pod in pods
        for policy in policies_of(pod)
        for other in pods
        if admits(policy, other)
    }
    apps = {pod.get("app") for pod in pods}
    postgres = "refrain-postgres"
    servers = {(postgres, "refrain-prefect"), (postgres, "refrain-mlflow")}
    assert may_reach == servers | {(a, b) for a in apps - {postgres} for b in apps}
    stranger = {"app": "another"}
    for pod in pods:
        assert policies_of(pod), "a pod without a policy admits everybody"
        assert not any(admits(policy, stranger) for policy in policies_of(pod))


def templates() -> list[dict[str, Any]]:
    spec = ray_cluster()["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    deployments = [one["spec"] for one in manifests() if one["kind"] == "Deployment"]
    return [group["template"] for group in [*groups, *deployments]]


def policies_of(pod: dict[str, str]) -> list[dict[str, Any]]:
    policies = [one["spec"] for one in manifests() if one["kind"] == "NetworkPolicy"]
    return [one for one in policies if selects(one["podSelector"], pod)]


def admits(policy: dict[str, Any], pod: dict[str, str]) -> bool:
    rules = policy["ingress"]
    return any(selects(peer["podSelector"], pod) for rule in rules for peer in rule["from"])


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a selector matches, as in Kubernetes: `NotIn` also holds without the label."""
    wanted = selector.get("matchLabels", {})
    if any(labels.get(name) != value for name, value in wanted.items()):
        return False
    return all(
        (labels.get(rule["key"]) in rule["values"]) == (rule["operator"] == "In")
        for rule in selector.get("matchExpressions", ())
    )


def test_nothing_in_kubernetes_is_served_to_the_outside() -> None:
    services = [one for one in manifests() if one["kind"] == "Service"]
    assert len(services) == 3
    assert all("type" not in one["spec"] for one in services)
    assert not any("hostPort" in p for c in containers() for p in c.get("ports", ()))
    assert not any("hostNetwork" in spec for spec in pod_specs())


def test_manifests_name_each_other() -> None:
    for spec in pod_specs():
        mounted = {m["name"] for c in spec["containers"] for m in c.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in spec.get("volumes", ())}
        for volume in spec.get("volumes", ()):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or claim in names("PersistentVolumeClaim")
            assert volume.get("configMap", {}).get("name") in {None, *names("ConfigMap")}
    hosts = {f"{name}-head-svc" for name in names("RayCluster")} | names("Service")
    text = "\n".join(str(container) for container in containers())
    named = set(re.findall(r"[/@'](refrain-[a-z-]+):\d+", text))
    assert named == hosts


def test_versions_are_those_that_are_installed() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", requirements("cpu.txt"), re.MULTILINE))
    assert ray_cluster()["spec"]["rayVersion"] == pins["ray"]
    assert (
        yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["prefect-version"]
        == (pins["prefect"])
    )
    shared = dict(re.findall(r"^([\w-]+)==(\S+)$", requirements("cluster.txt"), re.MULTILINE))
    assert {"boto3", "psycopg2-binary"} <= shared.keys()
    assert {name: pins[name] for name in shared if name in pins} == {
        name: version for name, version in shared.items() if name in pins
    }


def requirements(name: str) -> str:
    return (REPOSITORY / "infra" / "requirements" / name).read_text()


def test_prefect_reads_all_of_prefect_yaml() -> None:
    """Prefect ignores unknown keys, so a typo would go unnoticed."""
    from prefect.cli.deploy._models import PrefectYamlModel
    from prefect.flows import load_flow_arguments_from_entrypoint

    given = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
    read = PrefectYamlModel.model_validate(given)
    assert ignored(given, read.model_dump(by_alias=True, exclude_unset=True)) == []
    flows = {
        "train": "train",
        "train-sync": "train",
        "train-pipelined": "train",
        "profile": "profile",
        "evaluate": "evaluate",
    }
    assert {deployment.name for deployment in read.deployments} == flows.keys()
    for deployment in read.deployments:
        # `prefect deploy` wants the colon.
        module, _, function = (deployment.entrypoint or "").partition(":")
        flow = load_flow_arguments_from_entrypoint(f"{module}.{function}", {"name"})
        assert flow["name"] == flows[deployment.name or ""]


def ignored(given: Any, read: Any, at: str = "") -> list[str]:
    """Return the keys that are given but were not read."""
    if isinstance(given, list):
        pairs = zip(given, read, strict=True)
        return [
            key for i, (one, other) in enumerate(pairs) for key in ignored(one, other, f"{at}{i}.")
        ]
    if not isinstance(given, dict):
        return []
    inner = [key for k in given if k in read for key in ignored(given[k], read[k], f"{at}{k}.")]
    return [f"{at}{key}" for key in given if key not in read] + inner


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=30.0)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", ["RAY_HEAD", "PREFECT_API_URL", "MLFLOW_TRACKING_URI"])
def test_worker_script_names_missing_variables(missing: str) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "RAY_HEAD": "nowhere:1",
        "PREFECT_API_URL": "http://nowhere",
        "MLFLOW_TRACKING_URI": "http://nowhere",
    }
    del environment[missing]
    done = subprocess.run(
        ["bash", CLUSTER / "worker.sh"], env=environment, capture_output=True, timeout=30.0
    )
    assert done.returncode != 0
    assert missing.encode() in done.stderr


def test_rays_object_store_fits_into_half_of_shared_memory() -> None:
    """If it does not fit, Ray puts it on the disk. Engines need the other half."""
    spec = ray_cluster()["spec"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        memory = next(
            v["emptyDir"] for v in group["template"]["spec"]["volumes"] if "emptyDir" in v
        )
        store = int(group["rayStartParams"]["object-store-memory"])
        assert store <= gibibytes(memory["sizeLimit"]) / 2
        (container,) = group["template"]["spec"]["containers"]
        assert gibibytes(memory["sizeLimit"]) < gibibytes(
            container["resources"]["limits"]["memory"]
        )
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    for name in ("ray-head", "ray-worker"):
        (given,) = re.findall(
            r"--object-store-memory=\D*(\d+)", " ".join(services[name]["command"])
        )
        assert services[name]["shm_size"] == "${SHM_SIZE:-8gb}"
        assert int(given) <= 8 * 2**30 / 2


def gibibytes(size: str) -> int:
    assert size.endswith("Gi")
    return int(size[:-2]) * 2**30


def test_every_server_is_probed_and_bounded() -> None:
    deployments = [one for one in manifests() if one["kind"] == "Deployment"]
    for deployment in deployments:
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            assert "livenessProbe" in container
            assert container["resources"].keys() == {"requests", "limits"}


def test_a_node_without_rays_daemon_fails_its_probe() -> None:
    probe = [sys.executable, CLUSTER / "raylet_lives.py"]
    running = {process.name() for process in psutil.process_iter()}
    assert subprocess.run(probe, timeout=30.0).returncode == int("raylet" not in running)
    with named_process("raylet"):
        assert subprocess.run(probe, timeout=30.0).returncode == 0


@contextmanager
def named_process(name: str) -> Generator[None]:
    """Start a process with this name."""
    rename = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{name}')"
    wait = "print('there', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", f"{rename}; {wait}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield
        process.kill()
