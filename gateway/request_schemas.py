"""The fields of every body that the gateway takes, as JSON Schema: one table, from which the OpenAPI document is made.

Tests hold it against the parsers (each reads exactly the fields that the table has for it, and takes and refuses what
the schemas do at their bounds) and against the table in docs/api.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.chat_schemas import (
    ANY,
    BOOLEAN,
    CHOICE,
    GRAMMAR,
    NULL,
    REGEX,
    SCHEMA_OR_TEXT,
    Schema,
    array,
    closed,
    integer,
    messages,
    number,
    response_format,
    structured_outputs,
    template_kwargs,
    text,
    tool_choice,
    tools,
)
from gateway.config import GatewayConfig
from gateway.decoding import MAX_LOGIT_BIASES, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, MAX_TOKENS_CEILING
from gateway.parameters import HARMLESS, MAX_PRIORITY, MAX_TIMEOUT_S, NEUTRAL
from gateway.report import MAX_LOGPROBS
from shared.messages import ModelInfo

COMPLETIONS, CHAT, GENERATE = "completions", "chat", "generate"
ANSWERING = (COMPLETIONS, CHAT, GENERATE)
TOKENIZE, TOKENIZE_CHAT, DETOKENIZE = "tokenize", "tokenize chat", "detokenize"  # two forms of one endpoint
CHATS = (CHAT, TOKENIZE_CHAT)
ALL = (*ANSWERING, TOKENIZE, TOKENIZE_CHAT, DETOKENIZE)
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Field:
    """One field that is honoured. Null stands for an absent one, unless it is ``required``."""

    name: str
    endpoints: tuple[str, ...]
    schema: Schema
    about: str
    required: bool = False


def fields(config: GatewayConfig, model: ModelInfo | None, empty_prompts: bool = True) -> tuple[Field, ...]:
    """Every field that is honoured. What depends on the model is as wide as can be until a scheduler tells of it."""
    token = integer(0, model.vocab_size - 1 if model is not None else (1 << 32) - 1)
    length = model.max_model_len if model is not None else MAX_TOKENS_CEILING
    max_tokens = integer(1, length)
    prompt = text() if empty_prompts else text() | {"minLength": 1}
    token_ids = array(token, 1, length)
    return (
        Field("model", ALL, text(256), "the name of a model or of an adapter; another one is a 404"),
        Field(
            "prompt", (COMPLETIONS,),
            {"anyOf": [prompt, token_ids, *(array(one, 1, config.max_prompts) for one in (prompt, token_ids))]},
            "a text, a list of texts, token ids, or a list of such lists", required=True,
        ),
        Field("prompt", (GENERATE,), prompt, "a text", required=True),
        Field("prompt", (TOKENIZE,), text(), "a text", required=True),
        Field("messages", CHATS, messages(), "the conversation", required=True),
        Field("max_tokens", (CHAT, GENERATE), max_tokens, "most tokens of the answer"),
        Field("max_tokens", (COMPLETIONS,), integer(0, length), "most tokens; 0 only with echo and logprobs"),
        Field("max_completion_tokens", (CHAT,), max_tokens, "overrules max_tokens"),
        Field("n", ANSWERING, integer(1, config.max_n), "choices per prompt"),
        Field("best_of", ANSWERING, integer(1, config.max_n), "choices made, of which the n best are given"),
        Field("use_beam_search", ANSWERING, BOOLEAN, "beam search with best_of beams"),
        Field("length_penalty", ANSWERING, number(-10, 10), "of beam search"),
        Field("temperature", ANSWERING, number(0, 2), "0 is greedy"),
        Field("top_p", ANSWERING, number(0, 1, above=True), "nucleus sampling"),
        Field("top_k", ANSWERING, integer(-1, MAX_TOKENS_CEILING), "-1 and 0: off"),
        Field("min_p", ANSWERING, number(0, 1), "least probability, as a share of the highest"),
        Field("seed", ANSWERING, integer(-_INT64, _INT64 - 1), "the same seed, the same answer"),
        Field("presence_penalty", ANSWERING, number(-2, 2), "off the logit of each token that the answer has"),
        Field("frequency_penalty", ANSWERING, number(-2, 2), "off it for each time that the answer has it"),
        Field("repetition_penalty", ANSWERING, number(0, 2, above=True), "of tokens that prompt or answer have"),
        Field("logit_bias", ANSWERING, _logit_bias(), "added to the logits of tokens"),
        Field("stop", ANSWERING, _stop(config), "texts that end the answer"),
        Field("include_stop_str_in_output", ANSWERING, BOOLEAN, "the text that matched ends the answer's text"),
        Field("stop_token_ids", ANSWERING, array(token, 0, MAX_STOP_TOKEN_IDS), "tokens that end the answer"),
        Field("min_tokens", ANSWERING, integer(0, length), "nothing ends the answer before"),
        Field("ignore_eos", ANSWERING, BOOLEAN, "EOS does not end the answer"),
        Field("logprobs", (COMPLETIONS,), integer(0, MAX_LOGPROBS), "log-probabilities, with so many alternatives"),
        Field("logprobs", (CHAT,), BOOLEAN, "log-probabilities of the answer's tokens"),
        Field("top_logprobs", (CHAT,), integer(0, MAX_LOGPROBS), "alternatives for each of them"),
        Field("prompt_logprobs", (COMPLETIONS, CHAT), integer(0, MAX_LOGPROBS), "the same for the prompt's tokens"),
        Field("echo", (COMPLETIONS,), BOOLEAN, "the text begins with the prompt"),
        Field("skip_special_tokens", ANSWERING, BOOLEAN, "the text of special tokens is not shown"),
        Field("return_token_ids", (COMPLETIONS, CHAT), BOOLEAN, "the ids of prompt and answer"),
        Field("stream", ANSWERING, BOOLEAN, "the answer comes in pieces"),
        Field("stream_options", (COMPLETIONS, CHAT), _stream_options(), "only with stream"),
        Field("priority", ANSWERING, integer(-MAX_PRIORITY, MAX_PRIORITY), "lower runs first"),
        Field("timeout", ANSWERING, number(0, MAX_TIMEOUT_S, above=True), "seconds until the answer must be complete"),
        Field("cache_salt", (COMPLETIONS, CHAT), text(256), "the prefix cache is shared only under the same salt"),
        Field("add_generation_prompt", CHATS, BOOLEAN, "the rendered chat ends where the assistant begins"),
        Field("continue_final_message", CHATS, BOOLEAN, "the last message is continued"),
        Field("chat_template_kwargs", CHATS, template_kwargs(), "switches of the model's own template"),
        Field("tools", CHATS, tools(), "functions that the model may call"),
        Field("tool_choice", CHATS, tool_choice(), "whether it may, must, or which"),
        Field("parallel_tool_calls", CHATS, BOOLEAN, "more than one call"),
        Field("response_format", ANSWERING, response_format(), "what the answer must match"),
        Field("structured_outputs", ANSWERING, structured_outputs(), "the same, as vLLM has it"),
        Field("guided_json", ANSWERING, SCHEMA_OR_TEXT, "the same, as vLLM had it"),
        Field("guided_regex", ANSWERING, REGEX, "the same, as vLLM had it"),
        Field("guided_choice", ANSWERING, CHOICE, "the same, as vLLM had it"),
        Field("guided_grammar", ANSWERING, GRAMMAR, "the same, as vLLM had it"),
        Field("add_special_tokens", (TOKENIZE,), BOOLEAN, "of a text: with BOS and the like"),
        Field("return_token_strs", (TOKENIZE, TOKENIZE_CHAT), BOOLEAN, "each token as the vocabulary spells it"),
        Field("tokens", (DETOKENIZE,), array(token), "token ids", required=True),
    )  # fmt: skip


def body_schema(endpoint: str, table: tuple[Field, ...]) -> Schema:
    """What ``endpoint`` takes: nothing else is taken, so a misspelt field is a 400."""
    own = [field for field in table if endpoint in field.endpoints]
    required = {field.name: field.schema | {"description": field.about} for field in own if field.required}
    optional = {field.name: field.schema | {"description": field.about} for field in own if not field.required}
    neutral: dict[str, tuple[object, ...]] = {}
    if endpoint in ANSWERING:
        neutral = NEUTRAL
        optional = {name: ANY | {"description": "ignored"} for name in sorted(HARMLESS)} | optional
    elif endpoint == TOKENIZE_CHAT:
        neutral = {"add_special_tokens": (False,)}
    for name, values in neutral.items():
        if name not in required | optional:
            allowed = {"enum": list(values)} if values else NULL
            optional[name] = allowed | {"description": "not supported here: only with what asks for nothing"}
    return closed(required, optional)


def _logit_bias() -> Schema:
    return {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": number(-100, 100),
        "maxProperties": MAX_LOGIT_BIASES,
    }


def _stop(config: GatewayConfig) -> Schema:
    one = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    return {"anyOf": [one, array(one, 0, config.max_stop_strings)]}


def _stream_options() -> Schema:
    names = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    return closed({}, dict.fromkeys(names, BOOLEAN))
