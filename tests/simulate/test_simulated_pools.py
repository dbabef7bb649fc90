"""Pools of simulated workers: who is in which, and whose tokens are watched."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headrace import __main__ as cli
from headrace.simulate.scenario import Scenario, run
from headrace.simulate.worker_pools import pools_of
from headrace.simulate.workload import Request, merged, stream, uniform
from shared.config import ConfigError

SHORT = stream(uniform(50, 20), 40, 1, 20.0, "steady")
LONG = stream(uniform(3000, 20), 8, 2, 4.0, "steady")
MESH = Scenario(workers=3, worker_pools="short=2,long=1").with_limits(pools="short:-999,long:1000-")


def is_short(request: Request) -> bool:
    return request.prompt_len < 1000


def test_who_is_not_named_is_in_the_default_pool() -> None:
    assert pools_of(3, "") == ["default"] * 3
    assert pools_of(4, "a=1, b=2") == ["a", "b", "b", "default"]
    assert pools_of(2, "a=1/b=1") == ["a", "b"]


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=x", "a=-1", "a b=1", "a=1,a=1", "a=3", "a=1,b=99999999999999"])
def test_bad_ones_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--worker-pools"):
        pools_of(2, text)


def test_each_kind_runs_in_its_pool_and_what_is_watched_is_counted_apart() -> None:
    one = run(MESH.with_limits(pool_lend=""), merged(SHORT, LONG), watch=is_short)
    assert one.figures.served == 48
    assert int(one.measured.watched_gaps.counts.sum()) == 40 * 19
    assert int(one.measured.gaps.counts.sum()) == 48 * 19
    assert [key.pool for key in one.core.queues] == ["short", "long"]
    left = [queue.left for queue in one.core.queues.values()]
    assert left == [40, 8]


def test_clients_in_a_closed_loop_go_on_after_a_refusal() -> None:
    """Two thousand long prompts find no worker of their pool, and each client asks for its next one at once."""
    scenario = replace(MESH, worker_pools="short=2")
    refused, served = stream(uniform(3000, 20), 2000, 2, 0.0), stream(uniform(50, 20), 40, 1, 0.0)
    one = run(scenario, [*refused[:-5], *served, *refused[-5:]], concurrency=8)
    assert (one.figures.served, one.figures.refused) == (40, 2000)
    none = run(scenario, refused, concurrency=4096)
    assert (none.figures.served, none.figures.refused) == (0, 2000)


def test_a_comparison_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    apart = "pools=short:-999/long:1000-+worker-pools=short=1/long=1"
    words = ["simulate", "--workload", "rag", "--requests", "30", "--rate", "20", "--max-model-len"]
    assert cli.main([*words, "32768", "--compare", f"workers=2,{apart}", "--json"]) == 0
    assert [one["served"] for one in json.loads(capsys.readouterr().out)] == [30, 30]
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--workers", "1", "--worker-pools", "a=2"])
    assert "--worker-pools a=2: names 2 workers, of 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--pools", "a:3-2"])
    assert "pools (a:3-2) ends before it begins" in capsys.readouterr().err
