"""A planted case for each cause, in a mesh of processes: the explanation names it and adds up to what was waited."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from explained_calls import MS, SHARE, Call, ask, debug_url, end_to_end, explained, id_of, whole
from loopback_http import HTTP
from mesh_stack import BusClient
from whole_mesh import SIMULATED, Mesh, eventually, running_mesh

from headrace.explain import main
from shared.messages import Outcome

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

STEPS = ("--simulate-base-us", "10000", "--simulate-token-us", "100")


def prompt(length: int, first: int = 5) -> list[int]:
    """Token ids, another prompt for each ``first``: nothing is found in the prefix cache."""
    return [(first + index) % 250 + 5 for index in range(length)]


def simulated(folder: Path, blocks: int, *scheduler: str) -> Iterator[Mesh]:
    with running_mesh(
        folder, scheduler=scheduler, worker=(*SIMULATED, *STEPS, "--simulate-blocks", str(blocks))
    ) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[Mesh]:
    """Two places, and memory in plenty."""
    yield from simulated(tiny, 2000, "--max-num-seqs", "2", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def tight(tiny: Path) -> Iterator[Mesh]:
    """40 blocks of 16 tokens; nobody may pass the head."""
    yield from simulated(
        tiny, 40, "--max-num-seqs", "8", "--max-bypasses", "0", "--admission-watermark", "0",
        "--max-num-batched-tokens", "64",
    )  # fmt: skip


@pytest.fixture(scope="module")
def crowded(tiny: Path) -> Iterator[Mesh]:
    """20 blocks, given away without a thought for growth; six tokens a step."""
    yield from simulated(
        tiny, 20, "--max-num-seqs", "6", "--no-growth-aware-admission", "--admission-watermark", "0",
        "--max-num-batched-tokens", "6",
    )  # fmt: skip


def test_every_place_is_taken(narrow: Mesh) -> None:
    for index in range(2):
        Call(narrow, f"taken-{index}", prompt(20, index), 70).running()
    found = explained(narrow, Call(narrow, "late", prompt(20, 9), 5))
    assert found.main_cause("queue") == ("every place in the batch is taken", "")
    assert found.ms_of("queue", "every place") > 0.5 * found.told["total_ms"]


def test_no_blocks_for_the_head_and_whoever_is_behind_it(tight: Mesh) -> None:
    Call(tight, "holder", prompt(320), 70).running()
    big = Call(tight, "big", prompt(400, 50), 4)
    wait_for_waiting(tight, 1)
    small = Call(tight, "small", prompt(20, 90), 4)
    found = explained(tight, big)
    assert found.main_cause("queue") == ("no KV blocks for it", "")
    assert found.ms_of("queue", "no KV blocks for it") > 0.3 * found.told["total_ms"]
    behind = explained(tight, small)
    assert behind.main_cause("queue") == (
        "behind others: the first of them waits, no KV blocks for it", id_of(tight, big),
    )  # fmt: skip


def test_the_token_budget_goes_to_decodes(crowded: Mesh) -> None:
    running = [Call(crowded, f"decode-{index}", prompt(4, 20 * index), 55).running() for index in range(4)]
    found = explained(crowded, Call(crowded, "slow-prompt", prompt(60, 100), 2))
    assert found.main_cause("prefill")[0] == "most of the token budget went to decodes"
    assert found.ms_of("prefill", "token budget") > 0.5 * found.told["total_ms"]
    for call in running:
        call.done()


def test_a_preemption_and_who_needed_the_blocks(crowded: Mesh) -> None:
    calls = [Call(crowded, f"grows-{index}", prompt(30, 40 * index), 90) for index in range(4)]
    found = [explained(crowded, call) for call in calls]
    preempted = [one for one in found if one.told["preemptions"]]
    assert preempted, "nothing was preempted: the pool is too large for the test"
    ids = {one.told["request_id"] for one in found}
    for one in preempted:
        cause, by = one.main_cause("preempted")
        assert cause.startswith("preempted: no free block") and by in ids
        assert one.ms_of("prefill", "recompute after the preemption") or one.ms_of("prefill", "token budget")
        assert any("preempted" in gap["cause"] for gap in one.told["slow_gaps"]), "the longest gap is the preemption"


def test_a_long_prefill_beside_a_decode(narrow: Mesh) -> None:
    chat = Call(narrow, "chat", prompt(10, 3), 80).running()
    document = Call(narrow, "document", prompt(1500, 60), 2)
    found = explained(narrow, chat)
    document.done()
    name = id_of(narrow, document)
    assert found.ms_of("decode", "prompt tokens of others in the step", by=name) > 100
    worst = found.told["slow_gaps"][0]
    assert worst["by"] == name and f"prompt tokens ({name}" in worst["contents"]


def test_a_slow_client(tiny: Path) -> None:
    fast = ("--simulate-base-us", "500", "--simulate-token-us", "1")
    with running_mesh(tiny, worker=(*SIMULATED, *fast)) as mesh:
        reads_on = threading.Event()
        slow = Call(mesh, "slow", prompt(10), 1500, n=8, logprobs=5, receive_buffer=2048, reads_on=reads_on).running()
        eventually(lambda: mesh.metrics(mesh.gateway)["vllm:generation_tokens_total"] == 8 * 1500, "every token")
        time.sleep(1.0)  # what is tested: for so long at least it takes nothing of what is there
        reads_on.set()
        found = explained(mesh, slow)
        assert found.main_cause("stream") == ("the client reads slowly", "")
        assert found.ms_of("stream", "the client reads slowly") > 500


def test_a_lost_worker(tiny: Path) -> None:
    with running_mesh(tiny, worker=(*SIMULATED, *STEPS), gateway=("--resume-timeout-s", "2")) as mesh:
        call = Call(mesh, "lost", prompt(10), 5000).running()
        mesh.workers[0].kill()
        found = explained(mesh, call)
        assert b"error" in call.answer
        assert found.main_cause("decode")[0].startswith("lost: its worker is gone")
        assert found.ms_of("decode", "lost") > 500
        assert found.told["end"].startswith("lost: its worker is gone")


# --- while it runs ---------------------------------------------------------------------------------------------------


def test_a_request_that_runs_is_found_by_what_its_client_calls_it(
    narrow: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {
        "model": narrow.model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    headers = {"x-request-id": "still-running"}
    with narrow.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()  # kept: a stream whose iterator is gone is closed
        first = next(line for line in lines if line.startswith("data: "))
        answer_id = json.loads(first.removeprefix("data: "))["id"]
        told = [end_to_end(ask(narrow, name).json()) for name in (answer_id, "still-running")]
        assert main([answer_id, "--scheduler", debug_url(narrow)]) == 0
        page = HTTP.get(f"{debug_url(narrow)}/debug/requests/{answer_id}").text
    assert told[0]["request_id"] == told[1]["request_id"]
    for one in told:
        assert one["live"] and not one["answered"] and one["total_ms"] > 0
        assert (one["answer_id"], one["client_id"]) == (answer_id, "still-running")
    assert "still running" in capsys.readouterr().out
    assert "so far" in page and answer_id in page and "still-running" in page


def test_a_request_that_waits_says_for_what_and_how_long(narrow: Mesh) -> None:
    holders = [Call(narrow, f"holds-{index}", prompt(20, 3 * index), 5000).running() for index in range(2)]
    waits = Call(narrow, "waits", prompt(20, 99), 5)
    wait_for_waiting(narrow, 1)

    def told() -> dict[str, Any]:
        return end_to_end(ask(narrow, "waits").json())

    # At first it waits for the next plan, in which the worker looks whether it has a place.
    eventually(lambda: told()["by_cause"][0]["cause"] == "every place in the batch is taken", "why it waits")
    before, after = told(), told()
    assert before["live"] and after["live"]
    assert after["total_ms"] > before["total_ms"], "it lasts to the moment of the question"
    for call in (waits, *holders):
        call.hang_up()
        call.done()


# --- whatever else a call may be --------------------------------------------------------------------------------------


def test_several_choices(narrow: Mesh) -> None:
    found = explained(narrow, Call(narrow, "three", prompt(300, 7), 30, n=3, seed=4))
    assert found.told["choices"] == 3
    assert found.ms_of("queue", "every place in the batch is taken") > 0, "the third choice waits for a place"
    two = explained(narrow, Call(narrow, "two", prompt(300, 77), 30, n=2, seed=4))
    prefill = sum(one["tokens"] for one in two.told["intervals"] if one["stage"] == "prefill")
    assert prefill == 300, "a choice that forked has lived with the prompt that the first one computed"


def test_several_prompts(narrow: Mesh) -> None:
    call = Call(narrow, "batch", [prompt(30, 10), prompt(30, 40), prompt(30, 80)], 30)
    found = explained(narrow, call)
    others = [whole(narrow, name) for name in found.told["siblings"]]
    assert len(others) == 2 and all(one["client_id"] == "batch" for one in others)
    assert {one["answer_id"] for one in others} == {found.told["answer_id"]}
    assert found.main_cause("queue") == ("every place in the batch is taken", ""), "the one that it waited for is shown"


def test_a_beam_search(narrow: Mesh) -> None:
    call = Call(narrow, "beams", "abc", 60, path="/generate", n=2, use_beam_search=True, temperature=0, stream=False)
    explained(narrow, call)


def test_a_client_that_hangs_up(narrow: Mesh) -> None:
    call = Call(narrow, "gone", prompt(20, 33), 5000).running()
    call.hang_up()
    call.done()
    told = whole(narrow, "gone")
    assert told["end"] == "cancelled"
    assert told["total_ms"] == pytest.approx(call.ms, rel=SHARE, abs=MS)


def test_a_refusal_by_the_scheduler(narrow: Mesh) -> None:
    async def submit(client: BusClient) -> Outcome:
        return (await client.submit("endless", prompt(20), 10**6)).outcome

    outcome = narrow.on_the_bus(submit)
    assert outcome is not Outcome.ACCEPTED
    told = ask(narrow, "endless").json()
    assert told["end"].startswith(f"refused: {outcome.value}: ") and not told["live"]


def test_a_refusal_by_the_gateway_is_not_known_here(narrow: Mesh) -> None:
    refused = narrow.http.post(
        "/v1/completions",
        json={"model": narrow.model, "prompt": "a", "max_tokens": -1},
        headers={"x-request-id": "bad"},
    )
    assert refused.status_code == 400
    answer = ask(narrow, "bad")
    assert answer.status_code == 404 and "refused by its gateway" in answer.json()["error"]


def test_the_command_and_the_pages(narrow: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    url = debug_url(narrow)
    explained(narrow, Call(narrow, "typed", prompt(600, 15), 40))
    for index in range(2):
        explained(narrow, Call(narrow, f"listed-{index}", prompt(10, index), 2))
    assert main(["typed", "--scheduler", url]) == 0
    folded = capsys.readouterr().out
    assert main(["typed", "--scheduler", url, "--full"]) == 0
    full = capsys.readouterr().out
    assert "where the time went:" in folded and len(folded.splitlines()) <= len(full.splitlines())
    assert main(["--slowest", "3", "--scheduler", url]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 4, "a head, and three requests"
    with pytest.raises(SystemExit) as stopped:
        main(["nobody", "--scheduler", url])
    assert stopped.value.code == 1 and "refused by its gateway" in capsys.readouterr().err
    page = HTTP.get(f"{url}/debug/requests/typed").text
    assert "Where the time went" in page and "From beginning to end" in page
    missing = HTTP.get(f"{url}/debug/requests/%3Cb%3E")
    assert missing.status_code == 404 and "<b>" not in missing.text.split("<header>")[1].split("</h1>")[0]


def wait_for_waiting(mesh: Mesh, wanted: int) -> None:
    """The scheduler has so many in its queue."""
    eventually(
        lambda: HTTP.get(f"{debug_url(mesh)}/debug/state").json()["num_waiting"] >= wanted, f"{wanted} in the queue"
    )
