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
from gateway.parameters import Delivery
from gateway.token_details import TokenDetail
from gateway.token_report import TokenReport

Progress = Sequence[tuple[Choice, str]]

_json = msgspec.json.Encoder().encode

EVENT_STREAM = b"text/event-stream; charset=utf-8"
JSON_LINES = b"application/x-ndjson"
JSON = b"application/json"


class StreamWriter(Protocol):
    """How one answer is written while it comes."""

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


class Writer(StreamWriter, Protocol):
    """How one endpoint writes one answer."""

    answer_id: str  # what the client knows it by; empty if nothing tells

    def whole(self, texts: Sequence[str]) -> bytes:
        """The reply of a request that does not stream; one text for each choice."""
        ...


def json_text(text: str) -> bytes:
    """``text`` as JSON on what every client takes for one line.

    U+0085, U+2028 and U+2029 are legal in JSON and in SSE, but some clients split lines there.
    """
    encoded = _json(text)
    return encoded if text.isascii() else _one_line(encoded)


def _one_line(encoded: bytes) -> bytes:
    if not encoded.isascii():
        for char, escape in ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029")):
            encoded = encoded.replace(char, escape)
    return encoded


def one_line(tree: Any) -> bytes:
    """A tree as JSON on what every client takes for one line."""
    return _one_line(_json(tree))


def usage(flight: Flight, completion_tokens: int | None = None) -> dict[str, Any]:
    """``completion_tokens``: in place of those of all choices."""
    if completion_tokens is None:
        completion_tokens = flight.completion_tokens
    return {
        "prompt_tokens": flight.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": flight.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": flight.cached_tokens},
    }


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class _OpenAIWriter:
    """What chat and text completions share: the head of each object, usage, the end."""

    stream_media_type = EVENT_STREAM
    whole_object = ""
    chunk_object = ""

    def __init__(
        self, flight: Flight, answer_id: str, created_s: int, model: str, delivery: Delivery, report: TokenReport
    ) -> None:
        self._flight = flight
        self.answer_id = answer_id
        self._include_usage = include_usage = delivery.include_usage
        self._continuous_usage = delivery.continuous_usage
        self._report = report
        self._per_token = report.wanted.per_token
        self._head: dict[str, Any] = {"id": answer_id, "created": created_s, "model": model}
        head = _json({"id": answer_id, "object": self.chunk_object, "created": created_s, "model": model})
        self._frame_head = b"data: " + head[:-1] + b',"choices":['
        # OpenAI adds a null usage to all other chunks where usage is asked for.
        self._frame_tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def _frame(self, choice: bytes) -> bytes:
        return self._frame_head + choice + self._frame_tail

    def progress(self, progress: Progress) -> bytes:
        if self._continuous_usage:
            steps = progress[0][0].steps  # one choice's next step, whose own tokens are counted
            told = usage(self._flight, steps.num_tokens if steps is not None else None)
            self._frame_tail = b'],"usage":' + _json(told) + b"}\n\n"
        return self._detailed_progress(progress) if self._per_token else self._plain_progress(progress)

    def _plain_progress(self, progress: Progress) -> bytes:
        raise NotImplementedError

    def _detailed_progress(self, progress: Progress) -> bytes:
        """With log-probabilities or token ids: trees, and as much slower."""
        raise NotImplementedError

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
                **self._whole_extras(),
            }
        )

    def _prompt_extras(self, choice: Choice) -> dict[str, Any]:
        """vLLM's fields about the prompt that ``choice`` continues, as far as they were asked for."""
        extras: dict[str, Any] = {}
        if choice.prompt is None:
            return extras
        if self._report.wanted.token_ids:
            extras["prompt_token_ids"] = list(choice.prompt.ids)
        if self._report.wanted.prompt_logprobs >= 0:
            extras["prompt_logprobs"] = self._report.prompt_logprobs(choice.prompt)
        return extras

    def _token_ids(self, details: Sequence[TokenDetail]) -> dict[str, Any]:
        """vLLM's field with the ids behind a choice's text, if it was asked for."""
        return {"token_ids": [detail.token for detail in details]} if self._report.wanted.token_ids else {}

    def _whole_extras(self) -> dict[str, Any]:
        return {}

    def _whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError


class ChatWriter(_OpenAIWriter):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> bytes:
        frames = [
            self._frame(
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                % choice.index
            )
            for choice in self._flight.choices
        ]
        if extras := self._prompt_extras(self._flight.choices[0]):
            frames[0] = frames[0][:-3] + b"," + one_line(extras)[1:] + b"\n\n"
        return b"".join(frames)

    def _plain_progress(self, progress: Progress) -> bytes:
        frames = []
        for choice, text in progress:
            if text:
                frames.append(
                    self._frame(
                        b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
                        % (choice.index, json_text(text))
                    )
                )
            if choice.finish_reason is not None:
                frames.append(
                    self._frame(
                        b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}'
                        % (choice.index, _json(choice.finish_reason))
                    )
                )
        return b"".join(frames)

    def _detailed_progress(self, progress: Progress) -> bytes:
        frames = []
        for choice, text in progress:
            details = self._report.take_details(choice)
            finish_reason = choice.finish_reason
            if text:
                frames.append(self._detailed_frame(choice, {"content": text}, details, None))
                details = []
            if finish_reason is not None:
                frames.append(self._detailed_frame(choice, {}, details, finish_reason))
        return b"".join(frames)

    def _detailed_frame(
        self, choice: Choice, delta: dict[str, Any], details: Sequence[TokenDetail], finish_reason: str | None
    ) -> bytes:
        tree = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._report.chat_logprobs(details),
            "finish_reason": finish_reason,
            **self._token_ids(details),
        }
        return self._frame(one_line(tree))

    def _whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        details = self._report.take_details(choice) if self._per_token else []
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._report.chat_logprobs(details),
            "finish_reason": choice.finish_reason,
            **self._token_ids(details),
        }

    def _whole_extras(self) -> dict[str, Any]:
        return self._prompt_extras(self._flight.choices[0])  # a chat has one prompt


class CompletionWriter(_OpenAIWriter):
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._begun: set[int] = set()  # choices of whose prompt a stream has told

    def opening(self) -> bytes:
        return b""

    def _plain_progress(self, progress: Progress) -> bytes:
        return b"".join(
            self._frame(
                b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b}'
                % (choice.index, json_text(text), _json(choice.finish_reason))
            )
            for choice, text in progress
        )

    def _detailed_progress(self, progress: Progress) -> bytes:
        frames = []
        for choice, text in progress:
            tree = self._choice(choice, text)
            if choice.index not in self._begun:
                self._begun.add(choice.index)
                tree |= self._prompt_extras(choice)
            frames.append(self._frame(one_line(tree)))
        return b"".join(frames)

    def _whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        return self._choice(choice, text) | self._prompt_extras(choice)

    def _choice(self, choice: Choice, text: str) -> dict[str, Any]:
        details = self._report.take_details(choice) if self._per_token else []
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._report.completion_logprobs(details),
            "finish_reason": choice.finish_reason,
            **self._token_ids(details),
        }


class GenerateWriter:
    """vLLM's plain server: every reply holds the prompt and the whole text so far, for each choice."""

    answer_id = ""
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
