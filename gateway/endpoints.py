"""What the three endpoints that answer prompts do differently: how they read a body, tokenise, and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.config import GatewayConfig
from gateway.decoding import Decoding
from gateway.detokenizer import Vocabulary
from gateway.flight import Flight
from gateway.parameters import (
    DEFAULT_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    Delivery,
    parse_chat,
    parse_completion,
    parse_generate,
)
from gateway.report import Report
from gateway.token_report import TokenReport
from gateway.tokenizer import PromptTokenizer
from gateway.tool_template import ToolTemplate
from gateway.tool_writer import ToolFormat, ToolWriter
from gateway.writers import ChatWriter, CompletionWriter, GenerateWriter, Writer
from shared.messages import ModelInfo


@dataclass(frozen=True, slots=True)
class WriterContext:
    """What a writer needs beyond the request."""

    flight: Flight
    answer_id: str
    created_s: int
    model: str
    vocabulary: Vocabulary
    tools: ToolTemplate


class Request(Protocol):
    """What all valid requests have."""

    @property
    def model(self) -> str: ...
    @property
    def decoding(self) -> Decoding: ...
    @property
    def report(self) -> Report: ...
    @property
    def delivery(self) -> Delivery: ...


class Endpoint(Protocol):
    name: str  # metric label
    operation: str  # gen_ai.operation.name
    any_media_type: bool  # bodies are taken for JSON whatever their header says
    event_ids: bool  # a stream can have them, so that it can be resumed

    def parse(self, body: dict[str, Any], config: GatewayConfig) -> Request: ...
    def answer_id(self, name: str) -> str: ...  # made of a unique name; empty if its answers tell none
    def default_max_tokens(self, config: GatewayConfig) -> int: ...
    async def tokenize(self, request: Any, tokenizer: PromptTokenizer, model: ModelInfo) -> list[Sequence[int]]: ...
    def writer(self, request: Any, context: WriterContext) -> Writer: ...


class Completions:
    name = "completions"
    operation = "text_completion"
    any_media_type = False
    event_ids = True

    def parse(self, body: dict[str, Any], config: GatewayConfig) -> CompletionRequest:
        return parse_completion(body, config)

    def answer_id(self, name: str) -> str:
        return f"cmpl-{name}"

    def default_max_tokens(self, config: GatewayConfig) -> int:
        return DEFAULT_MAX_TOKENS

    async def tokenize(
        self, request: CompletionRequest, tokenizer: PromptTokenizer, model: ModelInfo
    ) -> list[Sequence[int]]:
        return await tokenizer.prompts(request.prompts, model.max_model_len, model.vocab_size)

    def writer(self, request: CompletionRequest, context: WriterContext) -> Writer:
        return CompletionWriter(
            context.flight, context.answer_id, context.created_s, context.model, request.delivery,
            TokenReport(request.report, context.vocabulary),
        )  # fmt: skip


class Generate(Completions):
    name = "generate"
    any_media_type = True  # tutorials send JSON with curl's -d, which calls it a form
    event_ids = False  # its streams are lines

    def parse(self, body: dict[str, Any], config: GatewayConfig) -> CompletionRequest:
        return parse_generate(body, config)

    def answer_id(self, name: str) -> str:
        return ""

    def writer(self, request: CompletionRequest, context: WriterContext) -> Writer:
        prompt = request.prompts[0]
        assert isinstance(prompt, str)
        return GenerateWriter(context.flight, prompt)


class Chat:
    name = "chat"
    operation = "chat"
    any_media_type = False
    event_ids = True

    def parse(self, body: dict[str, Any], config: GatewayConfig) -> ChatRequest:
        return parse_chat(body, config)

    def answer_id(self, name: str) -> str:
        return f"chatcmpl-{name}"

    def default_max_tokens(self, config: GatewayConfig) -> int:
        return config.chat_default_max_tokens

    async def tokenize(self, request: ChatRequest, tokenizer: PromptTokenizer, model: ModelInfo) -> list[Sequence[int]]:
        return [await tokenizer.chat(request.chat, model.max_model_len, model.vocab_size)]

    def writer(self, request: ChatRequest, context: WriterContext) -> Writer:
        arguments = (
            context.flight, context.answer_id, context.created_s, context.model, request.delivery,
            TokenReport(request.report, context.vocabulary),
        )  # fmt: skip
        use = request.chat.tools
        if use.choice == "none":
            return ChatWriter(*arguments)
        hidden = () if request.report.special_tokens else context.tools.hidden
        return ToolWriter(use, ToolFormat(context.tools.family, hidden), *arguments)
