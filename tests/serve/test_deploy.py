"""The files for operators say what the server has: options, variables and metrics."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from served import CHAT, ask, chat, serving

from dflash.light import options
from dflash_serve.command import ServeOptions, read_config

DEPLOY = Path(__file__).parents[2] / "deploy"
NAMES = {field.name for kind in (ServeOptions, options.ModelOptions) for field in dataclasses.fields(kind)}


def test_the_file_of_options_has_options():
    assert read_config(DEPLOY / "dflash.yaml").keys() <= NAMES


@pytest.mark.parametrize("name", ["compose.yaml", "Dockerfile"])
def test_variables_are_options(name):
    found = re.findall(r"(?<!define\.)DFLASH_([A-Z_]+)(?=[:=])", (DEPLOY / name).read_text())
    assert found
    assert {variable.lower() for variable in found} <= NAMES


def test_the_dashboard_shows_metrics_that_the_server_has():
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"(?:dflash|process)_[a-z_]+", query)}
    with serving() as service:
        ask(service, CHAT, chat(max_tokens=20))
        page = ask(service, "/metrics", None).text
    assert len(asked) > 15
    assert asked <= {*re.findall(r"^([a-z_]+)", page, re.MULTILINE)}


def test_files_of_yaml_can_be_read():
    paths = [*DEPLOY.glob("*.yaml")]
    assert len(paths) >= 3
    for path in paths:
        assert isinstance(yaml.safe_load(path.read_text()), dict)
