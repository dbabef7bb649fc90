"""The shared mesh, and beside it two gateways: tools in its template; an API key and room for one request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_whole_mesh import wait_ready
from tiny_models import CHAT_TEMPLATE, make_tokenizer
from whole_mesh import Mesh, free_port

KEY = "sesame"

# As the families have it whose templates take tools: the definitions first, then the turns, calls among them.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "</tools>\n"
    "For each call give name and arguments in <tool_call></tool_call> tags.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models' tokenizer with a chat template that defines tools."""
    folder = tmp_path_factory.mktemp("tools") / "model"
    tokenizer = make_tokenizer()
    assert tokenizer.chat_template == CHAT_TEMPLATE
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def beside(mesh: Mesh, folder: Path, *flags: str) -> Iterator[str]:
    """The URL of one more gateway of ``mesh``'s model."""
    port = free_port()
    command = ("--model", str(folder), "--served-model-name", mesh.model, "--port", str(port), *flags)
    process = mesh.stack.start("gateway", *command)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, 401 if "--api-key" in flags else 200)
        yield url + "/v1"
    finally:
        process.kill()


@pytest.fixture(scope="session")
def url(torch_mesh: Mesh, tool_folder: Path) -> Iterator[str]:
    """Base URL of a gateway whose template defines tools."""
    yield from beside(torch_mesh, tool_folder)


@pytest.fixture(scope="session")
def brief_url(torch_mesh: Mesh, tiny: Path) -> Iterator[str]:
    """Base URL of a gateway whose chat answers are short where the request names no length (2,048 tokens otherwise)."""
    yield from beside(torch_mesh, tiny, "--chat-default-max-tokens", "16")


@pytest.fixture(scope="session")
def guarded_url(torch_mesh: Mesh, tiny: Path) -> Iterator[str]:
    """Base URL of a gateway that asks for :data:`KEY` and works on one request at a time."""
    yield from beside(torch_mesh, tiny, "--api-key", KEY, "--max-concurrent-requests", "1")
