"""The models that this gateway serves, each with its tokenizer, chat template, tool parser and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.metrics import GatewayMetrics, ModelMetrics
from gateway.tokenizer import PromptTokenizer
from shared.messages import ModelInfo


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    tokenizer: PromptTokenizer
    metrics: ModelMetrics


@dataclass(frozen=True, slots=True)
class Target:
    """What a request's ``model`` has turned out to mean."""

    served: ServedModel
    info: ModelInfo  # of the base model, as the mesh describes it now
    adapter: str = ""  # the LoRA adapter that it is to run with; empty: none

    @property
    def name(self) -> str:
        """As clients know it."""
        return self.adapter or self.served.name


class Models:
    """In the order of ``--model``. The first one serves requests that name none."""

    def __init__(self, served: Sequence[ServedModel]) -> None:
        """At least one."""
        self._by_name = {one.name: one for one in served}
        self.first = served[0]

    @classmethod
    def load(cls, config: GatewayConfig, metrics: GatewayMetrics) -> Models:
        """Load every tokenizer, once for each path and parser; blocks. :class:`StartupError` for one that cannot be."""
        tokenizers: dict[tuple[str, str], PromptTokenizer] = {}
        served = []
        for source in config.sources:
            key = source.path, config.parser_of(source.name)
            if key not in tokenizers:
                tokenizers[key] = PromptTokenizer.load(key[0], config.tokenizer_threads, key[1])
            served.append(ServedModel(source.name, tokenizers[key], metrics.of(source.name)))
        return cls(served)

    def close(self) -> None:
        for one in self:
            one.tokenizer.close()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> ServedModel | None:
        return self._by_name.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)
