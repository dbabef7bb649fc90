"""What --model, --mesh and --tool-call-parser may name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from gateway.config_files import check_files
from headrace.settings import read_settings
from headrace.up_checks import check
from scheduler.config import SchedulerConfig
from shared.config import ConfigError, resolve
from shared.lifecycle import StartupError


def config(**options: Any) -> GatewayConfig:
    return resolve(GatewayConfig, "gateway", options, environ={})


def models(**options: Any) -> list[tuple[str, str]]:
    return [(source.name, source.path) for source in config(**options).sources]


def test_several_models_have_the_names_that_they_are_given() -> None:
    assert models(model="small=org/small, big=/models/big=1") == [("small", "org/small"), ("big", "/models/big=1")]
    assert models(model="small=org/small") == [("small", "org/small")]
    assert models(model="org/small", served_model_name="x") == [("x", "org/small")]


def test_a_folder_that_exists_is_one_model_however_it_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "step=100,lr=3"
    folder.mkdir()
    assert models(model=str(folder)) == [("step=100,lr=3", str(folder))]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": "a=x,y"}, "--model: 'a=x,y' must be NAME=MODEL throughout"),
        ({"model": "org/x,org/y"}, "--model: 'org/x,org/y' must be NAME=MODEL throughout"),
        ({"model": "a=x,a=y"}, "names 'a' twice"),
        ({"model": "a=x,"}, "must be NAME=MODEL, or several"),
        ({"model": "a="}, "must be NAME=MODEL, or several"),
        ({"model": "=x"}, "must be NAME=MODEL, or several"),
        ({"mesh": "a,"}, "--mesh: 'a,' must be names, separated by commas"),
        ({"mesh": "a,b,a"}, "has a name twice"),
        ({"tool_call_parser": "herpes"}, "has 'herpes', which is none of auto, hermes, llama3_json, mistral"),
        ({"tool_call_parser": "a=mistral,b=x"}, "has 'x'"),
        ({"tool_call_parser": "hermes,mistral"}, "must be NAME=PARSER throughout"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(**options)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": "a=x,b=y", "served_model_name": "c"}, "--model names its models itself; --served-model-name"),
        ({"model": "a=x,b=y", "tool_call_parser": "c=mistral"}, "--tool-call-parser names 'c'"),
    ],
)
def test_options_that_contradict_each_other_end_a_gateway_at_its_start(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        check_files(config(**options))


def test_a_tool_parser_for_each_model_or_for_all() -> None:
    one = config(model="a=x,b=y,c=z", tool_call_parser="b=mistral,hermes")
    assert [one.parser_of(name) for name in "abc"] == ["hermes", "mistral", "hermes"]
    assert config(tool_call_parser="llama3_json").parser_of("any") == "llama3_json"
    assert config(tool_call_parser="b=mistral").parser_of("a") == "auto"


def test_only_a_gateway_joins_several_meshes() -> None:
    assert config(mesh="east, west").meshes == ("east", "west")
    assert config(mesh="east,west").in_mesh("west").meshes == ("west",)
    with pytest.raises(ConfigError, match="only a gateway joins several meshes"):
        resolve(SchedulerConfig, "scheduler", {"mesh": "east,west"}, environ={})


def test_up_serves_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="serves one model"):
        check(read_settings(["--model", "a=x,b=y"], environ={}))
    with pytest.raises(SystemExit):
        read_settings(["--mesh", "a,b"], environ={})
    assert "must be one name" in capsys.readouterr().err
