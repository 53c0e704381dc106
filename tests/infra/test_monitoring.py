"""Prometheus finds the nodes and reaches only their metrics. Grafana's dashboard shows metrics that
exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.infra.test_cluster_files import CLUSTER, admits, policies_of, templates

MONITORING = CLUSTER / "monitoring"
PORT = 8080
PACKAGES = Path(pytest.__file__).parents[1]
SOURCES = {
    "vllm": ("vllm/v1/metrics/loggers.py", "vllm/v1/spec_decode/metrics.py"),
    "node": ("ray/dashboard/modules/reporter/reporter_agent.py",),
}


def read(name: str) -> Any:
    return yaml.safe_load((MONITORING / name).read_text())


def compose(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text())["services"]


def panels() -> list[dict[str, Any]]:
    return [one for one in read("dashboard.json")["panels"] if one["type"] != "row"]


def dashboard_metrics() -> set[str]:
    text = "\n".join(target["expr"] for panel in panels() for target in panel["targets"])
    return set(re.findall(r"\bray_\w+", text))


def test_prometheus_asks_each_node_at_its_port() -> None:
    services = compose("compose.yaml")
    (job,) = read("prometheus.yaml")["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    nodes = {name for name, one in services.items() if "RAY_AUTH_TOKEN" in one["environment"]}
    assert set(found["names"]) == nodes == {"ray-head", "ray-worker", "worker"}
    assert found["port"] == PORT
    for name in ("ray-head", "ray-worker"):
        assert f"--metrics-export-port={PORT}" in services[name]["command"]
    assert services["worker"]["environment"]["METRICS_PORT"] == str(PORT)


def test_a_prometheus_in_kubernetes_finds_the_nodes_and_reaches_no_other_port() -> None:
    monitor = read("pod-monitor.yaml")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    prometheus = {"app.kubernetes.io/name": "prometheus"}
    seen = set()
    for template in templates():
        labels = template["metadata"]["labels"]
        ports = [p for one in template["spec"]["containers"] for p in one.get("ports", ())]
        chosen = monitor["selector"]["matchLabels"].items() <= labels.items()
        if chosen and {"name": endpoint["port"], "containerPort": PORT} in ports:
            seen.add(template["spec"]["containers"][0]["name"])
        for policy in policies_of(labels):
            rules = [rule for rule in policy["ingress"] if admits({"ingress": [rule]}, prometheus)]
            assert [rule["ports"] for rule in rules] in ([], [[{"port": PORT}]])
    assert seen == {"ray-head", "ray-worker", "worker"}


def test_grafana_is_read_only_on_loopback_and_nothing_runs_as_root() -> None:
    services = compose("compose.monitoring.yaml")
    assert [one.get("ports", []) for one in services.values()] == [
        [],
        ["${BIND_ADDRESS:-127.0.0.1}:3000:3000"],
    ]
    for one in services.values():
        assert one["user"] in ("nobody", "grafana")
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]
        assert ":latest" not in one["image"]
    given = services["grafana"]["environment"]
    assert given["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert given["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_files_lie_where_they_are_mounted_from_and_looked_for() -> None:
    services = compose("compose.monitoring.yaml")
    mounted = {}
    for one in services.values():
        for volume in one["volumes"]:
            source, target, *mode = volume.split(":")
            if source.startswith("./"):
                assert (CLUSTER / source).is_file()
                assert mode == ["ro"]
                mounted[target] = source
    command = services["prometheus"]["command"]
    assert "--config.file=/etc/prometheus/prometheus.yaml" in command
    assert "/etc/prometheus/prometheus.yaml" in mounted
    (provider,) = read("dashboards.yaml")["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounted
    assert str(Path(home).parent) == provider["options"]["path"]


def test_dashboard_uses_the_provided_datasource() -> None:
    (source,) = read("datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    text = (MONITORING / "dashboard.json").read_text()
    asked = re.findall(r'"datasource": (\{.*?\})', text)
    assert len(asked) > len(panels())
    assert {json.dumps(json.loads(one)) for one in asked} == {
        json.dumps({"type": source["type"], "uid": source["uid"]})
    }


@pytest.mark.parametrize("metric", sorted(dashboard_metrics()))
def test_metrics_are_some_that_vllm_and_ray_have(metric: str) -> None:
    """Look in the sources of vLLM and Ray. The browser test of a cluster asks a real node for the
    metrics of Ray's core."""
    kind, _, name = metric.removeprefix("ray_").partition("_")
    if kind not in SOURCES:
        assert metric in ("ray_actors", "ray_object_store_memory")
        return
    sources = "".join((PACKAGES / file).read_text() for file in SOURCES[kind])
    own = f"vllm:{re.sub('_(total|bucket)$', '', name)}" if kind == "vllm" else f"node_{name}"
    assert f'"{own}"' in sources
