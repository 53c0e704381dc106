"""`refrain config`, the pages of documentation that it writes, and the library's names."""

import json
import re
import subprocess
import sys

import pytest
import yaml
from click.testing import CliRunner

import refrain
from refrain.flows.cli import main
from refrain.flows.launch import _config
from refrain.flows.show_api import api_page
from refrain.flows.show_config import metrics_page, reference_page
from tests.conftest import REPOSITORY


def run(*args):
    return CliRunner().invoke(main, ["config", *args])


def test_the_reference_is_up_to_date():
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert page == reference_page(), "run refrain config --reference > docs/configuration.md"


def test_the_page_of_metrics_is_up_to_date():
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    assert page == metrics_page(), "run refrain config --metrics > docs/metrics.md"


def test_the_page_of_the_python_api_is_up_to_date():
    page = (REPOSITORY / "docs" / "api.md").read_text()
    assert page == api_page(), "run refrain config --api > docs/api.md"
    assert {*refrain.__all__} <= {*re.findall(r"^## (\w+)", page, re.MULTILINE)}


def test_a_config_is_shown_with_overrides_and_defaults():
    shown = yaml.safe_load(run("infra/demo/train.yaml", "num_epochs=3").output)
    assert (shown["num_epochs"], shown["rollout"]["num_engines"]) == (3, 2)
    assert shown["drafting"]["enabled"] is True


def test_the_schema_is_one():
    schema = json.loads(run("--schema").output)
    assert schema["properties"]["placement"]["enum"] == ["auto", "shared", "split"]
    assert run().exit_code == 2


def test_importing_the_library_loads_nothing_heavy():
    code = (
        "import refrain, sys; assert not {'torch', 'ray', 'prefect', 'pydantic'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=REPOSITORY)


def test_names_of_the_library_are_there():
    assert all(getattr(refrain, name) for name in refrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = refrain.no_such_name


def test_a_run_is_looked_for_where_its_config_says(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path / "runs" / "mine")):
        _config(None, [f"runs_dir={tmp_path / 'runs'}"], "mine")
    config = _config("infra/demo/train.yaml", [f"runs_dir={tmp_path / 'runs'}"], "mine")
    assert config.run_dir == tmp_path / "runs" / "mine"
