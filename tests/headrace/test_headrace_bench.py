"""``headrace bench`` as a person meets it: its command line, and offered load on a real mesh with a simulated model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from headrace.bench import main
from headrace.bench.workload import WORKLOADS, endless_shots, mean_output_tokens, shots


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--loads", "1,x"], "--loads: 'x' is no positive number"),
        (["--loads", ""], "--loads: '' is no positive number"),
        (["--loads", "0"], "--loads: '0' is no positive number"),
        (["--loads", "inf"], "--loads: 'inf' is no positive number"),
        (["--loads", "1", "--seconds", "0"], "--seconds 2 or more"),
        (["--loads", "1", "--seconds", "nan"], "--seconds 2 or more"),
        (["--loads", "1", "--capacity", "-1"], "--capacity not negative"),
        (["--loads", "1", "--max-num-seqs", "0"], "--max-num-seqs must be positive"),
        (["--loads", "1", "--requests", "5"], "--requests does not go with --loads"),
        (["--capacity", "3"], "--capacity does not go without --loads"),
        (["--compare", "nonsense"], "'nonsense' is neither a policy"),
        (["--requests", "0"], "must be positive"),
        (["--compare", "static,foo=1"], "unrecognized arguments: --foo 1"),
        (["--compare", "run-ahead=x"], "--run-ahead: 'x' is no int"),
        (["--compare", "max-num-batched-tokens=1"], "max_num_batched_tokens (1) is less than"),
        (["--", "--bogus"], "unrecognized arguments: --bogus"),
        (["--loads", "1", "--", "--bogus"], "unrecognized arguments: --bogus"),
        (["--json", "/no/such/folder/o.json"], "--json /no/such/folder/o.json: No such file"),
    ],
)
def test_a_bad_command_line_is_one_line_and_exit_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out, errors = capsys.readouterr()
    assert ended.value.code == 2
    assert said in errors
    assert (out, errors.count("\n")) == ("", 1)


def test_loads_differ_in_their_rate_and_prompts_and_in_nothing_else() -> None:
    def first(rate: float, variation: int) -> list[tuple[float, int, int]]:
        load = endless_shots(WORKLOADS["chat"], 1, 5000, rate, 640, variation)
        return [(shot.at_s * rate, len(shot.prompt), shot.max_tokens) for shot in itertools.islice(load, 50)]

    for slow, fast in zip(first(1.0, 1), first(4.0, 2), strict=True):
        assert slow == pytest.approx(fast)
    one, other = (next(endless_shots(WORKLOADS["uniform"], 1, 5000, 1.0, 640, variation)) for variation in (1, 2))
    assert not set(one.prompt) & set(other.prompt) or one.prompt != other.prompt


def test_the_mean_output_is_that_of_the_load() -> None:
    assert mean_output_tokens(WORKLOADS["uniform"], 1, 640) == 64
    load = shots(WORKLOADS["chat"], 4000, 2, 5000, 0, 300)
    assert max(len(shot.prompt) + shot.max_tokens for shot in load) == 300
    mean = sum(shot.max_tokens for shot in load) / len(load)
    assert mean_output_tokens(WORKLOADS["chat"], 1, 300) == pytest.approx(mean, rel=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.mesh
def test_offered_load_on_a_simulated_mesh(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Capacity in a closed loop, then far too much of it with a short queue: refusals, and no loss of goodput."""
    file = tmp_path / "figures.json"
    code = main(
        ["--loads", "1,8", "--seconds", "3", "--max-num-seqs", "4", "--workload", "uniform", "--json", str(file), "--",
         "--simulate", "--model", str(model), "--simulate-base-us=4000", "--simulate-token-us=50",
         "--max-num-queued-reqs=8"]
    )  # fmt: skip
    out, errors = capsys.readouterr()
    assert code == 0, errors
    found = json.loads(file.read_text())
    assert found["capacity_per_s"] == pytest.approx(found["closed_loop"]["tokens_per_s"] / 64)
    one, eight = found["loads"]
    assert (one["load"], eight["load"]) == (1, 8)
    assert eight["offered_per_s"] == pytest.approx(8 * found["capacity_per_s"])
    assert eight["refused_429"] > 0
    assert eight["retry_after_share"] == 1
    assert eight["most_waiting"] <= 8
    assert one["failed"] == eight["failed"] == 0
    assert eight["goodput_per_s"] > 0
    # Counted at the clients and at the gateway: the same tokens.
    assert eight["tokens_per_s"] == pytest.approx(eight["gateway_tokens_per_s"], rel=0.2)
    assert eight["gateway_rss_after_mib"] > 1
    assert out.splitlines()[-1].startswith("goodput: 1x: ")
    assert "8x: " in out.splitlines()[-1]


@pytest.mark.mesh
def test_a_mesh_that_does_not_come_up_is_one_error_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--loads", "1", "--", "--model", "/no/such/model"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("/no/such/model: no such folder")
