"""Is a mesh ready, seen from outside: ``/ready``, then one real completion of one token."""

from __future__ import annotations

import asyncio
import json
import shlex
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from gateway.mesh_view import NO_WORKER

REPORT_EVERY_S = 10.0
POLL_S = 0.1
COMPLETION_TIMEOUT_S = 120.0


class NotServing(RuntimeError):
    """The mesh says that it is ready but refuses an ordinary completion; the message is one line."""


def base_url(host: str, port: int, tls: bool = False) -> str:
    """Where a client on this machine reaches a gateway that listens on ``host``."""
    reachable = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host)
    return f"{'https' if tls else 'http'}://{reachable or (f'[{host}]' if ':' in host else host)}:{port}"


async def wait_until_serving(
    url: str, model: str, report: Callable[[str], None], api_key: str = "", certificate: str = "", loaded: bool = False
) -> None:
    """Return once a completion has succeeded. Waits as long as it takes; ``report`` hears why every ten seconds.

    ``loaded``: others ask as well, so that a full queue is a mesh at work, and a completion may have to wait for long.

    ``certificate`` is the PEM file that a gateway with HTTPS serves: it is trusted, whatever host it is for.

    Raises :class:`NotServing` if a ready mesh answers the completion with a 4xx other than 429.
    """
    heard_at = began_at = time.monotonic()
    answered = False
    # trust_env off: a proxy of the environment has no business between us and our own loopback port.
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    verify = _trusting(certificate) if certificate else True
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=5.0, headers=headers, verify=verify) as client:
        while True:
            try:
                reason = await _try(client, model, loaded)
                answered = True
            except httpx.HTTPError as error:
                reason = f"the gateway does not answer ({str(error) or type(error).__name__})" if answered else ""
            if answered and not reason:
                return
            now = time.monotonic()
            if now - heard_at >= REPORT_EVERY_S:
                report(why_waiting(reason, now - began_at))
                heard_at = now
            await asyncio.sleep(POLL_S)


def why_waiting(reason: str, waited_s: float) -> str:
    """What a mesh that was just started does while it is not ready for ``reason``; empty: it has not answered yet.

    ``up`` started the workers itself and ends if one cannot start: one that is not ready is loading.
    """
    if not reason:
        return f"the gateway is starting ({waited_s:.0f} s)"
    if reason.startswith(NO_WORKER):
        return f"the worker is loading the model ({waited_s:.0f} s)"
    return f"not ready yet: {reason}"


def _trusting(certificate: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False  # it is asked by an address of this machine
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is enough, whoever signed it
    return context


async def _try(client: httpx.AsyncClient, model: str, loaded: bool = False) -> str:
    """Empty once a completion has succeeded, else why not. Raises httpx.HTTPError if the gateway does not answer."""
    ready = await client.get("/ready")
    if ready.status_code != 200:
        return _reason(ready)
    done = await client.post(
        "/v1/completions", json={"model": model, "prompt": "Hello", "max_tokens": 1}, timeout=COMPLETION_TIMEOUT_S
    )
    if 400 <= done.status_code < 500 and done.status_code != 429:
        raise NotServing(f"a first completion was refused with {done.status_code}: {_reason(done)}")
    return "" if done.status_code == 200 or (loaded and done.status_code == 429) else _reason(done)


def _reason(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        body = None
    if isinstance(body, dict):
        error = body.get("error")
        if isinstance(error, dict) and error.get("message"):
            return str(error["message"])
        for key in ("reason", "message", "status"):
            if isinstance(body.get(key), str):
                return str(body[key])
    return f"HTTP {response.status_code}"


def has_chat_template(folder: Path) -> bool:
    """True if the tokenizer in ``folder`` brings a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def curl_line(url: str, model: str, chat: bool, with_key: bool = False, certificate: str = "") -> str:
    """A command to paste into a shell: a streamed answer to "What is the capital of France?". Keys are not shown."""
    body: dict[str, object] = {"model": model}
    if chat:
        body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    else:
        body |= {"prompt": "The capital of France is", "max_tokens": 16}
    body |= {"temperature": 0, "stream": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    more = f" --cacert {shlex.quote(certificate)}" if certificate else ""
    more += ' -H "Authorization: Bearer $API_KEY"' if with_key else ""
    return f"curl -N{more} {url}{path} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
