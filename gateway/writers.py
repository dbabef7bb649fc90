"""Writes answers in their three forms: chat completions, text completions, and vLLM's plain ``/generate``.

A frame is composed from bytes prepared once for a choice and the JSON of the new text: no tree is built for a token.
Framing of the first two as OpenAI does it (server-sent events; CASES of clients are strict about it): ``data: `` plus
one line of JSON plus two line feeds; the role first; ``finish_reason`` null until exactly one is not; ``[DONE]`` last,
and only behind a whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from gateway.errors import ApiError
from gateway.flight import Choice, Flight

Progress = Sequence[tuple[Choice, str]]

_json = msgspec.json.Encoder().encode

EVENT_STREAM = b"text/event-stream; charset=utf-8"
JSON_LINES = b"application/x-ndjson"
JSON = b"application/json"


class Writer(Protocol):
    """How one endpoint writes one answer."""

    stream_media_type: bytes

    def opening(self) -> bytes:
        """What goes out before any token."""
        ...

    def progress(self, progress: Progress) -> bytes: ...

    def closing(self) -> bytes:
        """What ends a whole answer."""
        ...

    def error(self, error: ApiError) -> bytes:
        """What ends a stream that cannot go on."""
        ...

    def whole(self, texts: Sequence[str]) -> bytes:
        """The reply of a request that does not stream; one text for each choice."""
        ...


def json_text(text: str) -> bytes:
    """``text`` as JSON on what every client takes for one line.

    U+0085, U+2028 and U+2029 are legal in JSON and in SSE, but some clients split lines there.
    """
    encoded = _json(text)
    if not text.isascii():
        for char, escape in ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029")):
            encoded = encoded.replace(char, escape)
    return encoded


def usage(flight: Flight) -> dict[str, int]:
    completion_tokens = flight.completion_tokens
    return {
        "prompt_tokens": flight.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": flight.prompt_tokens + completion_tokens,
    }


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class _OpenAIWriter:
    """What chat and text completions share: the head of each object, usage, the end."""

    stream_media_type = EVENT_STREAM
    whole_object = ""
    chunk_object = ""

    def __init__(self, flight: Flight, answer_id: str, created_s: int, model: str, include_usage: bool) -> None:
        self._flight = flight
        self._include_usage = include_usage
        self._head: dict[str, Any] = {"id": answer_id, "created": created_s, "model": model}
        head = _json({"id": answer_id, "object": self.chunk_object, "created": created_s, "model": model})
        self._frame_head = b"data: " + head[:-1] + b',"choices":['
        # OpenAI adds a null usage to all other chunks where usage is asked for.
        self._frame_tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def _frame(self, choice: bytes) -> bytes:
        return self._frame_head + choice + self._frame_tail

    def closing(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._include_usage:
            return done
        return self._frame_head + b'],"usage":' + _json(usage(self._flight)) + b"}\n\n" + done

    def error(self, error: ApiError) -> bytes:
        return _event(error.body())

    def whole(self, texts: Sequence[str]) -> bytes:
        choices = [self._whole_choice(choice, text) for choice, text in zip(self._flight.choices, texts, strict=True)]
        head = self._head
        return _json(
            {
                "id": head["id"],
                "object": self.whole_object,
                "created": head["created"],
                "model": head["model"],
                "choices": choices,
                "usage": usage(self._flight),
            }
        )

    def _whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError


class ChatWriter(_OpenAIWriter):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> bytes:
        return b"".join(
            self._frame(
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                % choice.index
            )
            for choice in self._flight.choices
        )

    def progress(self, progress: Progress) -> bytes:
        frames = []
        for choice, text in progress:
            if text:
                frames.append(
                    self._frame(
                        b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
                        % (choice.index, json_text(text))
                    )
                )
            if choice.text.finish_reason is not None:
                frames.append(
                    self._frame(
                        b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}'
                        % (choice.index, _json(choice.text.finish_reason))
                    )
                )
        return b"".join(frames)

    def _whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": choice.text.finish_reason,
        }


class CompletionWriter(_OpenAIWriter):
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self) -> bytes:
        return b""

    def progress(self, progress: Progress) -> bytes:
        return b"".join(
            self._frame(
                b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b}'
                % (choice.index, json_text(text), _json(choice.text.finish_reason))
            )
            for choice, text in progress
        )

    def _whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": choice.text.finish_reason,
        }


class GenerateWriter:
    """vLLM's plain server: every reply holds the prompt and the whole text so far, for each choice."""

    stream_media_type = JSON_LINES

    def __init__(self, flight: Flight, prompt: str) -> None:
        self._prompt = prompt
        self._flight = flight
        self._texts: list[str] = []  # prompt and text so far of each choice, once the stream has begun

    def opening(self) -> bytes:
        return b""

    def progress(self, progress: Progress) -> bytes:
        if not self._texts:
            self._texts = [self._prompt] * len(self._flight.choices)
        for choice, text in progress:
            self._texts[choice.index] += text
        return b'{"text":[' + b",".join(json_text(text) for text in self._texts) + b"]}\n"

    def closing(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return error.body() + b"\n"

    def whole(self, texts: Sequence[str]) -> bytes:
        return _json({"text": [self._prompt + text for text in texts]})
