"""What the gateway answers, as JSON Schema. Closed objects: a field that is not declared here is not sent."""

from __future__ import annotations

from gateway.chat_schemas import ANY, Schema, array, nullable, text

COUNT: Schema = {"type": "integer", "minimum": 0}
LOG_PROB: Schema = {"type": "number", "minimum": -9999}
TOKEN_IDS: Schema = array(COUNT)


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _const(value: str) -> Schema:
    return {"type": "string", "const": value}


def _all(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """A closed object that has all of ``properties``, but for the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


FINISH_REASON = nullable({"type": "string", "enum": ["stop", "length", "tool_calls"]})
PROMPT_LOGPROBS = array(nullable({"type": "object", "additionalProperties": ref("PromptLogprob")}))

SCHEMAS: dict[str, Schema] = {
    "Error": _all(
        {
            "error": _all(
                {"message": text(), "type": text(), "param": nullable(text()), "code": nullable(text())},
            )
        }
    ),
    "Usage": _all(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": _all({"cached_tokens": COUNT}),
        }
    ),
    "PromptLogprob": _all({"logprob": LOG_PROB, "rank": COUNT, "decoded_token": text()}),
    "CompletionLogprobs": _all(
        {
            "tokens": array(text()),
            "token_logprobs": array(nullable(LOG_PROB)),
            "top_logprobs": array(nullable({"type": "object", "additionalProperties": LOG_PROB})),
            "text_offset": array(COUNT),
        }
    ),
    "CompletionChoice": _all(
        {
            "index": COUNT,
            "text": text(),
            "logprobs": nullable(ref("CompletionLogprobs")),
            "finish_reason": FINISH_REASON,
            "token_ids": TOKEN_IDS,
            "prompt_token_ids": TOKEN_IDS,
            "prompt_logprobs": PROMPT_LOGPROBS,
        },
        ("token_ids", "prompt_token_ids", "prompt_logprobs"),
    ),
    "Completion": _all(
        {
            "id": text(),
            "object": _const("text_completion"),
            "created": COUNT,
            "model": text(),
            "choices": array(ref("CompletionChoice"), 1),
            "usage": ref("Usage"),
        }
    ),
    "TopLogprob": _all({"token": text(), "logprob": LOG_PROB, "bytes": array(COUNT)}),
    "ChatLogprob": _all(
        {"token": text(), "logprob": LOG_PROB, "bytes": array(COUNT), "top_logprobs": array(ref("TopLogprob"))}
    ),
    "ToolCall": _all(
        {
            "id": text(),
            "type": _const("function"),
            "function": _all({"name": text(), "arguments": text()}),
        }
    ),
    "ChatChoice": _all(
        {
            "index": COUNT,
            "message": _all(
                {
                    "role": _const("assistant"),
                    "content": nullable(text()),
                    "refusal": {"type": "null"},
                    "tool_calls": array(ref("ToolCall"), 1),
                },
                ("tool_calls",),
            ),
            "logprobs": nullable(_all({"content": array(ref("ChatLogprob")), "refusal": {"type": "null"}})),
            "finish_reason": FINISH_REASON,
            "token_ids": TOKEN_IDS,
        },
        ("token_ids",),
    ),
    "ChatCompletion": _all(
        {
            "id": text(),
            "object": _const("chat.completion"),
            "created": COUNT,
            "model": text(),
            "choices": array(ref("ChatChoice"), 1),
            "usage": ref("Usage"),
            "prompt_token_ids": TOKEN_IDS,
            "prompt_logprobs": PROMPT_LOGPROBS,
        },
        ("prompt_token_ids", "prompt_logprobs"),
    ),
    "Generated": _all({"text": array(text(), 1)}),
    "Tokens": _all(
        {"count": COUNT, "max_model_len": COUNT, "tokens": TOKEN_IDS, "token_strs": nullable(array(text()))},
    ),
    "Detokenized": _all({"prompt": text()}),
    "Model": _all(
        {
            "id": text(),
            "object": _const("model"),
            "created": COUNT,
            "owned_by": text(),
            "root": text(),
            "parent": nullable(text()),
            "max_model_len": nullable(COUNT),
        }
    ),
    "Models": _all({"object": _const("list"), "data": array(ref("Model"))}),
    "Health": _all({"status": _const("ok")}),
    "Readiness": _all({"status": _const("ready")}),
    "Version": _all({"version": text()}),
    "Document": {
        "type": "object",
        "properties": {"openapi": text()},
        "required": ["openapi"],
        "additionalProperties": ANY,
    },
}
