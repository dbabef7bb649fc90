"""The gateway's options, declared once: flags, environment, file and documentation all come from here."""

from __future__ import annotations

import dataclasses

from gateway.sources import (
    AUTO,
    ModelSource,
    meshes,
    meshes_problem,
    parsers,
    parsers_problem,
    sources,
    sources_problem,
)
from shared.config import MeshConfig, at_least, between, option


@dataclasses.dataclass(frozen=True)
class GatewayConfig(MeshConfig):
    """The HTTP gateway of a Headrace mesh: OpenAI-compatible API, tokenising, streaming."""

    mesh: str = option(
        "default", "name of the mesh, or several, comma-separated: requests are shared out among them",
        check=meshes_problem,
    )  # fmt: skip
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one", check=between(0, 65535))
    model: str = option(
        "",
        "the model, for its tokenizer: a local folder, a GGUF file or a Hugging Face id; 'default' is SmolLM2. Several "
        "are NAME=MODEL, comma-separated; the first one serves requests that name none",
        check=sources_problem,
    )
    served_model_name: str = option("", "name of the only model in the API; empty: the folder's name, or the id")
    metrics_host: str = option("127.0.0.1", "address of the metrics listener")
    metrics_port: int = option(9400, "port of the metrics listener; 0 takes a free one", check=between(0, 65535))
    api_key: str = option("", "the one API key that clients must send; no limits are bound to it", secret=True)
    api_keys: str = option("", "TOML file of API keys, tenants and limits; read again when it changes")
    tls_cert: str = option("", "PEM file: serve HTTPS with this certificate (and its chain)")
    tls_key: str = option("", "PEM file with the certificate's private key; empty: it is in the same file")
    max_body_bytes: int = option(8 << 20, "largest request body", check=at_least(1024))
    body_timeout_s: float = option(30.0, "how long a client may take to send a body", check=between(0.1, 3600))
    max_concurrent_requests: int = option(4096, "HTTP requests worked on at once; more get 429", check=at_least(1))
    max_connections: int = option(
        16384, "client connections held at once, idle ones too; more get 503. Each needs a file descriptor, so it is "
        "less where the hard limit on open files is low", check=at_least(1),
    )  # fmt: skip
    max_n: int = option(128, "largest n (choices per prompt)", check=between(1, 4096))
    max_prompts: int = option(1024, "most prompts in one request", check=between(1, 65536))
    max_choices: int = option(1024, "most prompts times n in one request", check=between(1, 65536))
    max_stop_strings: int = option(16, "most stop strings in one request", check=between(1, 64))
    chat_default_max_tokens: int = option(
        2048, "cap on a chat answer whose request names no limit; the room left in the context also caps it",
        check=at_least(1),
    )  # fmt: skip
    tool_call_parser: str = option(
        "auto", "how the model writes tool calls: hermes, llama3_json or mistral; auto tells it by the chat template. "
        "Where models differ: NAME=PARSER, comma-separated", check=parsers_problem,
    )  # fmt: skip
    tokenizer_threads: int = option(2, "threads that tokenise, for each model", check=between(1, 64))
    submit_timeout_s: float = option(
        5.0, "how long a request is offered to the scheduler before 503", check=between(0.1, 600)
    )
    scheduler_stale_s: float = option(
        3.0, "a scheduler silent for longer counts as absent: new requests get 503", check=between(0.1, 600)
    )
    resume_timeout_s: float = option(
        30.0, "open requests that were interrupted, or whose scheduler is silent, end with an error after so long",
        check=between(0.2, 3600),
    )  # fmt: skip
    mesh_away_s: float = option(
        10.0, "with several meshes: an open request goes on in another one once its own has been away for so long",
        check=between(0.2, 3600),
    )  # fmt: skip
    slow_reader_timeout_s: float = option(
        120.0, "a client that takes nothing of a waiting answer for so long is disconnected", check=at_least(1)
    )
    drain_grace_s: float = option(
        30.0, "how long open requests may go on after SIGTERM before they end with an error", check=at_least(0)
    )
    retire_grace_s: float = option(
        600.0, "how long they may go on at a gateway that another has replaced (SIGUSR1, `headrace restart`)",
        check=at_least(0),
    )  # fmt: skip

    @property
    def sources(self) -> tuple[ModelSource, ...]:
        """The models under the names that API and mesh know them by. Raises ValueError for what cannot go together."""
        return sources(self.model, self.served_model_name)

    @property
    def meshes(self) -> tuple[str, ...]:
        return meshes(self.mesh)

    def in_mesh(self, name: str) -> GatewayConfig:
        """As for a gateway of that mesh alone."""
        return dataclasses.replace(self, mesh=name)

    @property
    def parsers(self) -> dict[str, str]:
        """How models write tool calls, by their names; under the empty name that of all others."""
        return parsers(self.tool_call_parser)

    def parser_of(self, model: str) -> str:
        families = self.parsers
        return families.get(model, families.get("", AUTO))
