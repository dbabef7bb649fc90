"""The gateway as a process: what it needs to start, and how it says no."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.__main__ import main
from gateway.config import GatewayConfig

REPOSITORY = Path(__file__).parents[2]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:gateway", "-c", code],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_it_runs_without_torch_and_without_a_word(tokenizer_folder: Path) -> None:
    done = run_python(
        "import sys; sys.modules['torch'] = None\n"
        "import gateway.service\n"
        "from gateway.tokenizer import PromptTokenizer\n"
        f"tokenizer = PromptTokenizer.load({str(tokenizer_folder)!r})\n"
        "from gateway.parameters import parse_chat\n"
        "from gateway.config import GatewayConfig\n"
        "chat = parse_chat({'messages': [{'role': 'user', 'content': 'hi'}]}, GatewayConfig()).chat\n"
        "print(len(tokenizer._encode_chat(chat)))\n"
        "assert sys.modules['torch'] is None\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 5


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_taken_port_is_named(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = {"--port": "0", "--metrics-port": "0", flag: str(port)}
        arguments = [part for pair in flags.items() for part in pair]
        done = run_python(f"import sys; from gateway.__main__ import main; sys.exit(main({arguments!r}))")
    assert done.returncode == 2
    assert done.stderr.strip() == f"headrace: port {port} on 127.0.0.1 is taken; choose another with {flag}"


@pytest.mark.parametrize("model", ["", "/no/such/folder"])
def test_a_model_that_is_not_there(model: str) -> None:
    arguments = ["--port", "0", "--metrics-port", "0", "--model", model]
    done = run_python(f"import sys; from gateway.__main__ import main; sys.exit(main({arguments!r}))")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "headrace: " in done.stderr


def test_bad_flags_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--port", "99999"])
    assert caught.value.code == 2
    assert "--port" in capsys.readouterr().err


def test_the_served_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    for options, name in (
        ({"model": str(tmp_path / "my-model")}, "my-model"),
        ({"model": "org/name"}, "org/name"),
        ({"model": "org/name", "served_model_name": "x"}, "x"),
    ):
        assert [source.name for source in GatewayConfig(**options).sources] == [name]
