"""HTTPS: with a certificate made here, and nothing but HTTPS on its port."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from pathlib import Path

import httpx
import openai
import pytest
from certificates import Certificate, make_certificate
from gateway_mesh import MODEL, running_gateway

from gateway.config import GatewayConfig
from gateway.config_files import check_tls
from headrace.readiness import base_url, curl_line, wait_until_serving
from shared.lifecycle import StartupError


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_answers_and_streams_come_over_https_only(tokenizer_folder: Path, certificate: Certificate) -> None:
    tls = {"tls_cert": str(certificate.cert), "tls_key": str(certificate.key)}
    with running_gateway(tokenizer_folder, **tls) as gw:
        context = ssl.create_default_context(cafile=str(certificate.ca))
        url = gw.url.replace("http://", "https://")
        with httpx.Client(verify=context) as trusting:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=trusting, max_retries=0)
            whole = client.completions.create(model=MODEL, prompt="x", max_tokens=20, temperature=0, seed=1)
            stream = client.completions.create(
                model=MODEL, prompt="x", max_tokens=20, temperature=0, seed=1, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text != ""
        with httpx.Client() as doubting, pytest.raises(httpx.ConnectError, match="certificate"):
            doubting.get(f"{url}/health")
        with httpx.Client() as plain, pytest.raises(httpx.HTTPError):
            plain.get(f"{gw.url}/health")


def test_what_cannot_be_used_is_named_at_the_start(tmp_path: Path, certificate: Certificate) -> None:
    good = GatewayConfig(tls_cert=str(certificate.cert), tls_key=str(certificate.key))
    check_tls(good)
    check_tls(GatewayConfig())
    other = make_certificate(tmp_path)
    for changes in (
        {"tls_cert": str(tmp_path / "none.pem")},
        {"tls_key": str(other.key)},
        {"tls_key": ""},
        {"tls_cert": ""},
    ):
        with pytest.raises(StartupError, match="--tls-") as error:
            check_tls(dataclasses.replace(good, **changes))
        assert "\n" not in str(error.value)


def test_up_finds_its_gateway_serving_with_a_key_and_its_own_certificate(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    other = make_certificate(tmp_path, names="DNS:llm.example")  # of another name than the address asked
    tls = {"tls_cert": str(other.cert), "tls_key": str(other.key)}
    with running_gateway(tokenizer_folder, api_key="k", **tls) as gw:
        url = base_url("127.0.0.1", gw.port, tls=True)
        asyncio.run(asyncio.wait_for(wait_until_serving(url, MODEL, print, "k", str(other.cert)), 20))
        assert len(gw.mesh.submits) == 1
        line = curl_line(url, MODEL, chat=False, with_key=True, certificate=str(other.cert))
        assert f"--cacert {other.cert} https://127.0.0.1:{gw.port}/" in line.replace(
            ' -H "Authorization: Bearer $API_KEY"', ""
        )
        assert 'Bearer $API_KEY"' in line
