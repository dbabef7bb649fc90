"""The dashboard in a real browser, over a mesh under load: it shows what runs, and leads to why a request was slow."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chromium import Chromium, find_chromium
from explained_calls import debug_url
from loopback_http import HTTP, NO_AUTHORITIES
from whole_mesh import SIMULATED, Mesh, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.browser, pytest.mark.timeout(300)]

CLIENTS = 30
SHOTS = os.environ.get("HEADRACE_SHOTS", "")
"""A folder for the screenshots of the documentation; they are not taken without it."""

WARM_S = 65 if SHOTS else 0


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> Iterator[Mesh]:
    """Two workers with little memory, and clients that keep them busy."""
    scheduler = (
        "--scheduler-id", "scheduler-0", "--max-num-seqs", "10", "--max-num-batched-tokens", "384",
        "--no-growth-aware-admission", "--admission-watermark", "0",
    )  # fmt: skip
    steps = ("--simulate-base-us", "14000", "--simulate-token-us", "90", "--simulate-blocks", "220")
    worker = (*SIMULATED, *steps)
    with running_mesh(tiny, scheduler=scheduler, worker=(*worker, "--worker-id", "worker-0")) as mesh:
        mesh.stack.start(
            "worker", "--model", str(tiny), "--served-model-name", mesh.model, *worker, "--worker-id", "worker-1"
        )
        over = threading.Event()
        clients = [threading.Thread(target=_client, args=(mesh, number, over)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            time.sleep(WARM_S)
            yield mesh
        finally:
            over.set()
            for client in clients:
                client.join()


def _client(mesh: Mesh, number: int, over: threading.Event) -> None:
    chance = random.Random(number)
    system = [7 * index % 250 + 5 for index in range(96)]  # a prompt that many begin with
    with httpx.Client(verify=NO_AUTHORITIES, base_url=mesh.url, timeout=120) as http:
        for turn in itertools.count():
            if over.is_set():
                return
            length = chance.choice([20, 60, 200, 200, 1200 if number % 5 == 0 else 300])
            prompt = (system if number % 2 else []) + [chance.randint(5, 255) for _ in range(length)]
            body = {
                "model": mesh.model, "prompt": prompt, "max_tokens": chance.randint(20, 160), "ignore_eos": True,
                "stream": True, "priority": chance.choice([0, 0, 0, 1, 5]),
            }  # fmt: skip
            name = {"x-request-id": f"chat-{number}-{turn}"}
            with http.stream("POST", "/v1/completions", json=body, headers=name) as answer:
                for _ in answer.iter_bytes():
                    if over.is_set():
                        break
            over.wait(chance.random() / 4)


@pytest.fixture
def browser() -> Iterator[Chromium]:
    binary = find_chromium()
    if binary is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium, or name one in $CHROMIUM")
    made = Chromium(binary, 1400, 1240)
    yield made
    made.close()


def shot(browser: Chromium, name: str) -> None:
    if SHOTS:
        browser.screenshot(Path(SHOTS) / name)


def test_from_a_slow_request_to_its_explanation(loaded: Mesh, browser: Chromium) -> None:
    url = debug_url(loaded)
    browser.colour_scheme("light")
    browser.open(f"{url}/dashboard")
    browser.until("document.querySelectorAll('.worker canvas').length === 2")
    # Columns have been drawn: the strip is not one colour.
    browser.until(
        "(c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"
        "(document.querySelector('.worker canvas')) > 8"
    )
    browser.until("document.querySelectorAll('#running tr').length >= 4")
    browser.until("document.querySelectorAll('#slowest tr').length >= 3")
    browser.until("/[1-9]/.test(document.querySelector('#latency tr td:nth-child(2)').textContent)")
    browser.move(".worker canvas", across=0.97)
    browser.until("document.getElementById('tip').style.display === 'block'")
    assert browser.text("#tip").startswith("step ") and "rows: " in browser.text("#tip")
    if SHOTS:
        browser.size(1400, 1240)
        browser.value("scrollTo(0, 0)")
        browser.move("#top")
        _settle(browser)
        shot(browser, "dashboard-light.png")
        browser.colour_scheme("dark")
        _settle(browser)
        shot(browser, "dashboard-dark.png")
        browser.colour_scheme("light")
    polls = int(browser.value("document.documentElement.dataset.polls"))
    browser.until(f"+document.documentElement.dataset.polls > {polls + 2}")  # it goes on
    slow = str(browser.value("document.querySelector('#slowest tr a').textContent"))
    browser.click("#slowest tr a")
    browser.until("location.pathname.startsWith('/debug/requests/') && document.readyState === 'complete'")
    landed = str(browser.value("decodeURIComponent(location.pathname.split('/').pop())"))
    assert landed.startswith("req-") and landed in browser.text("h1")
    told = HTTP.get(f"{url}/debug/requests/{landed}?format=json").json()
    assert told["took_ms"] >= 0.5 * HTTP.get(f"{url}/debug/requests/{slow}?format=json").json()["took_ms"]
    assert told["by_cause"][0]["cause"] in browser.text()
    folded = "document.querySelectorAll('details:not([open])').length"
    if browser.value(folded):
        browser.click("details > summary")
        browser.until("document.querySelector('details[open] .row:not(summary)')?.getBoundingClientRect().height > 0")
        if SHOTS:
            browser.value("document.querySelector('details').open = false; scrollTo(0, 0)")
            shot(browser, "explain.png")
    assert not browser.errors


def test_a_scheduler_that_is_gone_is_told(tiny: Path, browser: Chromium) -> None:
    with running_mesh(tiny, worker=SIMULATED, scheduler=("--metrics-port", "0")) as mesh:
        browser.open(f"{debug_url(mesh)}/dashboard")
        browser.until("document.getElementById('live').className === '' && document.querySelector('.worker') !== null")
        assert "nothing runs" in browser.text() and "nothing waits" in browser.text()
        mesh.scheduler.kill()
        browser.until("document.getElementById('live').className === 'off'")
        assert "does not answer" in browser.text("#who")


def _settle(browser: Chromium) -> None:
    """Two more polls."""
    polls = int(browser.value("document.documentElement.dataset.polls"))
    browser.until(f"+document.documentElement.dataset.polls >= {polls + 3}")
