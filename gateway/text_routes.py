"""``POST /tokenize`` and ``/detokenize``, as vLLM's server has them: text to ids and back, without generating."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.access import access_of
from gateway.body import ClientGone, check_media_type, parse_json, timely_body
from gateway.chat_messages import Chat, read_chat
from gateway.decoding import is_token_id
from gateway.errors import ApiError, invalid
from gateway.fields import Fields
from gateway.gateway import Gateway
from gateway.parameters import read_model
from gateway.responses import send_error, send_whole


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    model: str  # empty: whatever is served
    source: str | Chat
    add_special_tokens: bool  # of a text; a chat template spells its own
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    model: str
    tokens: tuple[int, ...]


def parse_tokenize(body: dict[str, Any]) -> TokenizeRequest:
    """A text in ``prompt``, or a conversation in ``messages``."""
    fields = Fields(body)
    prompt = fields.raw("prompt")
    chat = fields.raw("messages") is not None
    if chat and prompt is not None:
        raise invalid("'prompt' and 'messages' exclude each other", "messages")
    if chat:
        source: str | Chat = read_chat(fields)
    elif isinstance(prompt, str):
        source = prompt
    else:
        raise invalid("'prompt' must be a string, or 'messages' a conversation", "prompt")
    special = True if chat else fields.boolean("add_special_tokens", True)
    request = TokenizeRequest(read_model(fields), source, special, fields.boolean("return_token_strs", False))
    fields.finish((), {"add_special_tokens": (False,)})
    return request


def parse_detokenize(body: dict[str, Any]) -> DetokenizeRequest:
    fields = Fields(body)
    tokens = fields.required("tokens")
    if not isinstance(tokens, list) or not all(is_token_id(token) for token in tokens):
        raise invalid("'tokens' must be a list of token ids", "tokens")
    request = DetokenizeRequest(read_model(fields), tuple(tokens))
    fields.finish((), {})
    return request


class TextRoute(Protocol):
    name: str  # metric label

    async def answer(self, gateway: Gateway, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a body; an ``ApiError`` if it cannot be had."""
        ...


class Tokenize:
    name = "tokenize"

    async def answer(self, gateway: Gateway, body: dict[str, Any]) -> dict[str, Any]:
        request = parse_tokenize(body)
        target = await gateway.target(request.model)
        model, tokenizer = target.info, target.served.tokenizer
        if isinstance(request.source, Chat):
            tokens = await tokenizer.chat(request.source, model.max_model_len, model.vocab_size)
        else:
            tokens = await tokenizer.tokenize(request.source, request.add_special_tokens, model.max_model_len)
        return {
            "count": len(tokens),
            "max_model_len": model.max_model_len,
            "tokens": tokens,
            "token_strs": tokenizer.spellings(tokens) if request.return_token_strs else None,
        }


class Detokenize:
    name = "detokenize"

    async def answer(self, gateway: Gateway, body: dict[str, Any]) -> dict[str, Any]:
        request = parse_detokenize(body)
        target = await gateway.target(request.model)
        vocab_size = target.info.vocab_size
        if max(request.tokens, default=0) >= vocab_size:
            raise invalid(f"'tokens' has the id {max(request.tokens)}; ids end at {vocab_size - 1}", "tokens")
        return {"prompt": await target.served.tokenizer.detokenize(request.tokens)}


class TextApp:
    """The ASGI application of one such route."""

    def __init__(self, gateway: Gateway, route: TextRoute) -> None:
        self._gateway = gateway
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        headers: list[tuple[bytes, bytes]] = []
        outcome = "failed"
        access = access_of(scope)
        gateway.enter(access)
        try:
            gateway.check_open()
            access.enter()
            headers += access.headers()
            check_media_type(scope)
            body = await timely_body(scope, receive, gateway.config.max_body_bytes, gateway.config.body_timeout_s)
            answer = await self._route.answer(gateway, parse_json(body))
            gateway.give_back(access)
            await send_whole(send, 200, msgspec.json.encode(answer), headers)
            outcome = "finished"
        except ApiError as error:
            outcome = error.outcome
            gateway.give_back(access)
            await send_error(send, error, headers)
        except ClientGone:
            outcome = "aborted"
        finally:
            gateway.give_back(access)
            gateway.leave()
            gateway.metrics.requests.labels(self._route.name, outcome).inc()
