"""``headrace explain``: whom it asks, and what it says where there is no explanation."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from headrace.explain import main
from headrace.settings import SCHEDULER_ENV, read_settings
from observability.listener import InternalListener, Page

LISTED = {
    "took_ms": 12.5, "request_id": "r1", "client_id": "cli-1", "prompt_tokens": 3, "generated_tokens": 4,
    "preemptions": 0, "end": "length",
}  # fmt: skip


def page(value: object, status: int = 200) -> Page:
    return Page(json.dumps(value).encode(), "application/json", status)


@pytest.fixture
def listener() -> Iterator[InternalListener]:
    """The internal listener of any service."""
    made = InternalListener(CollectorRegistry(), "127.0.0.1", 0)
    yield made
    made.close()


@pytest.fixture
def standby() -> Iterator[str]:
    """The URL of another scheduler, which remembers a request of when it led."""
    made = InternalListener(CollectorRegistry(), "127.0.0.1", 0)
    made.add("/debug/scheduler", lambda rest, query: page({"scheduler": "s-2", "mesh": "blue", "leads": False}))
    made.add("/debug/requests", lambda rest, query: page([]) if not rest else page({"error": "no such"}, 404))
    yield f"http://127.0.0.1:{made.port}"
    made.close()


def test_of_several_the_one_that_leads_is_asked(
    listener: InternalListener, standby: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{listener.port}"
    listener.add("/debug/scheduler", lambda rest, query: page({"scheduler": "s-1", "mesh": "blue", "leads": True}))
    listener.add("/debug/requests", lambda rest, query: page({"error": "not by me"}, 404) if rest else page([LISTED]))
    for several in (f"{standby},{url}", f"{url}, {standby}/", f"http://127.0.0.1:1,{standby},{url}"):
        assert main(["--slowest", "1", "--scheduler", several, "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out) == [LISTED] and err == f"headrace explain: scheduler s-1 of mesh blue at {url}\n"
    with pytest.raises(SystemExit) as ended:
        main(["r1", "--scheduler", f"{standby},{url}"])
    err = capsys.readouterr().err
    assert ended.value.code == 1 and "s-1" in err and "s-2" in err and "not by me (see --slowest)" in err


def test_one_that_led_before_is_asked_for_what_the_leader_does_not_know(
    listener: InternalListener, standby: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{listener.port}"
    listener.add("/debug/scheduler", lambda rest, query: page({"scheduler": "s-1", "mesh": "blue", "leads": False}))
    listener.add("/debug/requests", lambda rest, query: page({"request_id": rest}))
    assert main(["r1", "--scheduler", f"{standby},{url}", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"request_id": "r1"} and "s-1" in err and "s-2" not in err


@pytest.fixture
def scheduler(listener: InternalListener) -> str:
    """The URL of a scheduler that remembers one request."""
    listener.add("/debug/scheduler", lambda rest, query: page({"scheduler": "s-1", "mesh": "blue"}))
    listener.add("/debug/requests", lambda rest, query: page({"error": "no such"}, 404) if rest else page([LISTED]))
    return f"http://127.0.0.1:{listener.port}"


def test_it_says_which_scheduler_answered_and_whose_requests_they_are(
    scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--slowest", "1", "--scheduler", scheduler + "/"]) == 0
    out, err = capsys.readouterr()
    assert err == f"headrace explain: scheduler s-1 of mesh blue at {scheduler}\n"
    assert "cli-1" in out and "r1" in out
    assert main(["--slowest", "1", "--scheduler", scheduler, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [LISTED]


def test_the_environment_says_where(
    scheduler: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SCHEDULER_ENV, scheduler)
    assert main(["--slowest", "1"]) == 0
    assert scheduler in capsys.readouterr().err
    read_settings([])  # `headrace up` takes it for no setting of its own


def test_an_unknown_request_is_exit_1(scheduler: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nobody", "--scheduler", scheduler])
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines()[1] == "headrace explain: no such (see --slowest)"


def test_another_service_is_no_scheduler(listener: InternalListener, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["any", "--scheduler", f"http://127.0.0.1:{listener.port}"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert "no scheduler, but something else answers" in error


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "give the id of a request, or --slowest N"),
        (["r1", "--slowest", "3"], "not both"),
        (["--slowest", "0"], "N is at least 1"),
        (["--slowest", "-2"], "N is at least 1"),
        (["r1", "--scheduler", "http://127.0.0.1:1,localhost:9401"], "'localhost:9401' is no http URL"),
        (["r1", "--scheduler", ","], "',' is no http URL"),
        (["r1", "--scheduler", "localhost:9401"], "'localhost:9401' is no http URL"),
        (["r1", "--scheduler", "http://127.0.0.1:1"], "no scheduler answers at http://127.0.0.1:1/"),
    ],
)
def test_bad_settings_are_one_line_and_exit_2(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("headrace explain: ") and error.count("\n") == 1
    assert complaint in error
