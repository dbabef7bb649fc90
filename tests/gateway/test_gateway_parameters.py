"""Bodies to valid requests: what is honoured, what is harmless, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.body import parse_json
from gateway.chat_messages import ChatMessage
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.parameters import Delivery, parse_chat, parse_completion, parse_generate
from gateway.report import Report
from shared.messages import ModelInfo

LIMITS = GatewayConfig(max_n=8, max_prompts=4, max_choices=12)
MODEL = ModelInfo("m", max_model_len=100, vocab_size=50, workers=1)
HI = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> Any:
    return parse_completion({"prompt": "hi", **fields}, LIMITS)


def chat(**fields: Any) -> Any:
    return parse_chat({"messages": HI, **fields}, LIMITS)


def refused(call: Any, param: str | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status == 400
    if param is not None:
        assert caught.value.param == param
    return caught.value


def test_defaults_are_those_of_openai_and_vllm() -> None:
    decoding = completion().decoding
    assert (decoding.n, decoding.temperature, decoding.top_p, decoding.top_k, decoding.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert decoding.bind(MODEL, 10, 16).max_tokens == 16
    assert (decoding.stop, decoding.stop_token_ids, decoding.ignore_eos, decoding.min_tokens) == ((), (), False, 0)


def test_every_field_that_is_honoured_arrives() -> None:
    request = completion(
        model="m", n=2, max_tokens=7, temperature=0, top_p=0.5, top_k=3, min_p=0.1, min_tokens=2, ignore_eos=True,
        seed=-1, stop=["a", "b", "a"], stop_token_ids=[4, 4], include_stop_str_in_output=True, cache_salt="s",
        stream=True, stream_options={"include_usage": True}, user="u", priority=-3,
    )  # fmt: skip
    sampling = request.decoding.bind(MODEL, 10, 16)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        7, 0.0, 0.5, 3, 0.1,
    )  # fmt: skip
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, [4])
    assert sampling.seed == 2**63 - 1
    assert request.decoding.stop == ("a", "b")
    assert (request.model, request.decoding.n) == ("m", 2)
    assert request.delivery == Delivery(True, include_usage=True, cache_salt="s", priority=-3)


def test_null_means_absent() -> None:
    nulls = dict.fromkeys(
        ("n", "max_tokens", "temperature", "stop", "seed", "logit_bias", "logprobs", "stream_options")
    )
    assert completion(**nulls).decoding.n == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "5"),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "NaN"), ("temperature", True), ("temperature", []),
        ("top_p", 0), ("top_p", -0.1), ("top_p", 1.1), ("min_p", 1.1), ("top_k", -2), ("top_k", 1.0),
        ("n", 0), ("n", 9), ("n", True), ("n", 10**6), ("n", 10**400), ("min_tokens", -1),
        ("seed", 2**63), ("seed", 1.0), ("seed", "1"), ("stream", 1), ("ignore_eos", "yes"), ("model", 5),
        ("stop", ""), ("stop", [""]), ("stop", [1]), ("stop", {}), ("stop", ["x"] * 17), ("stop", "x" * 1025),
        ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", "1"), ("stop_token_ids", [2**32]),
        ("presence_penalty", 10), ("presence_penalty", -2.1), ("frequency_penalty", 2.1), ("frequency_penalty", "1"),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", 2.1),
        ("logit_bias", []), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"05": 1}),
        ("logit_bias", {"٣": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"5": True}), ("logit_bias", {"5": "1"}),
        ("logit_bias", {str(token): 1 for token in range(301)}), ("logit_bias", {"1" * 5000: 1}),
        ("logprobs", 21), ("logprobs", -1), ("logprobs", True), ("logprobs", 1.0), ("echo", 1), ("suffix", "x"),
        ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("prompt_logprobs", False), ("return_token_ids", 1),
        ("top_logprobs", 1), ("bad_words", ["x"]), ("priority", 101), ("priority", 1.0), ("priority", "high"),
        ("response_format", "json_object"), ("guided_regex", ""), ("regex", "a*"), ("tools", [{}]),
        ("chat_template", "x"), ("no_such_field", 1), ("skip_special_tokens", 0),
        ("cache_salt", 5), ("cache_salt", "x" * 257),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(field: str, value: Any) -> None:
    error = refused(lambda: completion(**{field: value}), field)
    assert field in error.message
    parse_json(error.body())


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u"}, {"metadata": {"a": "b"}}, {"store": True}, {"service_tier": "auto"}, {"frequency_penalty": 0},
        {"presence_penalty": 0.0}, {"logit_bias": {}}, {"echo": False}, {"suffix": ""}, {"best_of": 1},
        {"response_format": {"type": "text"}}, {"repetition_penalty": 1}, {"use_beam_search": False}, {"top_k": -1},
        {"top_k": 0}, {"tools": []}, {"temperature": 1e-8}, {"top_p": 1e-9}, {"top_k": 10**6},
    ],
)  # fmt: skip
def test_harmless_and_neutral_fields_are_taken(fields: dict[str, Any]) -> None:
    completion(**fields)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", ("",)), ([""], ("",)), (["a", "b"], ("a", "b")), ([5, 6], ((5, 6),)), ([[5], [6, 7]], ((5,), (6, 7))),
    ],
)  # fmt: skip
def test_the_four_forms_of_a_prompt(prompt: Any, expected: Any) -> None:
    assert parse_completion({"prompt": prompt}, LIMITS).prompts == expected


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [[5], []], [-1], [2**63], [1.5], [True], ["a", 5], [["a"]], {}, 5, ["a"] * 5, [[5], "a"]]
)
def test_prompts_that_are_none(prompt: Any) -> None:
    refused(lambda: parse_completion({"prompt": prompt}, LIMITS), "prompt")


def test_a_long_list_of_token_ids_is_one_prompt() -> None:
    assert len(parse_completion({"prompt": [1] * 500}, LIMITS).prompts) == 1


def test_prompts_times_n_is_bounded() -> None:
    refused(lambda: parse_completion({"prompt": ["a"] * 4, "n": 4}, LIMITS), "n")


@pytest.mark.parametrize(
    ("body", "option"),
    [
        ({"prompt": "a", "n": 9}, "--max-n"),
        ({"prompt": "a", "best_of": 9}, "--max-n"),
        ({"prompt": ["a"] * 4, "n": 4}, "--max-choices"),
        ({"prompt": ["a"] * 5}, "--max-prompts"),
        ({"prompt": "a", "stop": ["x"] * 17}, "--max-stop-strings"),
    ],
)
def test_a_limit_that_an_option_sets_names_it(body: dict[str, Any], option: str) -> None:
    with pytest.raises(ApiError, match=option):
        parse_completion(body, LIMITS)


def test_top_k_over_the_vocabulary_is_no_top_k() -> None:
    assert completion(top_k=10**6).decoding.bind(MODEL, 10, 16).top_k == 0


def test_the_context_limit_is_named() -> None:
    assert "100" in refused(lambda: completion(max_tokens=91).decoding.bind(MODEL, 10, 16), "max_tokens").message
    assert "100" in refused(lambda: completion().decoding.bind(MODEL, 100, 16)).message
    assert completion(max_tokens=90).decoding.bind(MODEL, 10, 16).max_tokens == 90
    assert "100" in refused(lambda: completion(max_tokens=10**400).decoding.bind(MODEL, 10, 16)).message


def test_the_default_is_capped_by_the_room() -> None:
    assert completion().decoding.bind(MODEL, 95, 16).max_tokens == 5


def test_min_tokens_over_max_tokens() -> None:
    refused(lambda: completion(min_tokens=5, max_tokens=4).decoding.bind(MODEL, 10, 16), "min_tokens")
    refused(lambda: completion(min_tokens=17).decoding.bind(MODEL, 10, 16), "min_tokens")


def test_stop_token_ids_end_at_the_vocabulary() -> None:
    assert completion(stop_token_ids=[49]).decoding.bind(MODEL, 10, 16).stop_token_ids == [49]
    refused(lambda: completion(stop_token_ids=[50]).decoding.bind(MODEL, 10, 16), "stop_token_ids")


def test_a_seed_is_drawn_where_none_is_given() -> None:
    seeds = {completion().decoding.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert completion(seed=5).decoding.seed == 5


def test_stream_options_need_a_stream() -> None:
    refused(lambda: completion(stream_options={"include_usage": True}), "stream_options")
    refused(lambda: completion(stream=True, stream_options={"continuous_usage_stats": 1}), "continuous_usage_stats")
    refused(lambda: completion(stream=True, stream_options={"usage": True}), "usage")
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True, stream_options=both).delivery.continuous_usage
    assert not completion(stream=True, stream_options={"continuous_usage_stats": True}).delivery.continuous_usage
    refused(lambda: completion(stream=True, stream_options=[]), "stream_options")


def test_generate_needs_no_model_and_one_text() -> None:
    request = parse_generate({"prompt": "hi", "max_tokens": 5, "temperature": 0.0}, LIMITS)
    assert request.prompts == ("hi",)
    refused(lambda: parse_generate({"prompt": ["hi"]}, LIMITS), "prompt")
    refused(lambda: parse_generate({}, LIMITS), "prompt")
    refused(lambda: parse_generate({"prompt": "hi", "max_completion_tokens": 3}, LIMITS), "max_completion_tokens")


def test_max_completion_tokens_is_honoured() -> None:
    assert chat(max_completion_tokens=3).decoding.max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=9).decoding.max_tokens == 3
    assert chat(max_tokens=9).decoding.max_tokens == 9
    refused(lambda: chat(max_completion_tokens=0), "max_completion_tokens")
    refused(lambda: chat(max_completion_tokens=3, max_tokens=True), "max_tokens")


def messages(*items: Any) -> Any:
    return parse_chat({"messages": list(items)}, LIMITS).chat.messages


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a b"}]
    assert messages({"role": "user", "content": parts}) == messages({"role": "user", "content": "a b"})
    two = [*parts, {"type": "text", "text": "c"}]
    assert messages({"role": "user", "content": two}) == (ChatMessage("user", "a b\nc"),)


def test_developer_is_system() -> None:
    assert messages({"role": "developer", "content": "x"}) == (ChatMessage("system", "x"),)


def test_an_answer_can_be_sent_back() -> None:
    answer = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    assert messages(answer, {"role": "user", "content": "y", "name": "bob"})[0].content == "x"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": [], "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ("x", "messages[0]"),
    ],
)
def test_messages_that_are_refused(message: Any, param: str) -> None:
    refused(lambda: messages(message), param)


@pytest.mark.parametrize("value", [None, [], "x", {}])
def test_messages_are_needed(value: Any) -> None:
    refused(lambda: parse_chat({"messages": value}, LIMITS), "messages")


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ x }}"}, {"chat_template_kwargs": {"chat_template": "x"}},
        {"tools": {"type": "function"}},
        {"tool_choice": "required"}, {"response_format": "json_object"}, {"logprobs": 3},
        {"top_logprobs": 3}, {"top_logprobs": 3, "logprobs": False}, {"top_logprobs": 21, "logprobs": True},
        {"echo": True}, {"functions": [{}]}, {"reasoning_effort": "high"}, {"modalities": ["audio"]},
    ],
)  # fmt: skip
def test_chat_features_that_are_refused(fields: dict[str, Any]) -> None:
    refused(lambda: chat(**fields), next(iter(fields)))


def test_continuing_needs_an_assistant_and_no_generation_prompt() -> None:
    refused(lambda: chat(continue_final_message=True), "continue_final_message")
    history = [*HI, {"role": "assistant", "content": "well"}]
    request = parse_chat({"messages": history, "continue_final_message": True}, LIMITS)
    assert (request.chat.continue_final_message, request.chat.add_generation_prompt) == (True, False)
    both = {"messages": history, "continue_final_message": True, "add_generation_prompt": True}
    refused(lambda: parse_chat(both, LIMITS), "continue_final_message")


def test_penalties_and_biases_arrive() -> None:
    request = completion(
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.3, logit_bias={"0": -100, "49": 2.5}
    )
    sampling = request.decoding.bind(MODEL, 10, 16)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2.0, 2.0, 1.3)
    assert sampling.logit_bias == [(0, -100.0), (49, 2.5)]
    neutral = completion().decoding.bind(MODEL, 10, 16)
    assert (neutral.presence_penalty, neutral.frequency_penalty, neutral.repetition_penalty) == (0, 0, 1)
    assert neutral.logit_bias == []


def test_biased_ids_end_at_the_vocabulary() -> None:
    refused(lambda: completion(logit_bias={"50": 1}).decoding.bind(MODEL, 10, 16), "logit_bias")


def test_each_endpoint_asks_for_log_probabilities_in_its_way() -> None:
    assert completion().report == Report() == chat().report == chat(logprobs=False, top_logprobs=0).report
    assert completion(logprobs=0).report == Report(logprobs=0) == chat(logprobs=True).report
    assert completion(logprobs=20).report == Report(logprobs=20) == chat(logprobs=True, top_logprobs=20).report
    assert completion(logprobs=3).decoding.bind(MODEL, 10, 16).logprobs == 3
    assert completion().decoding.bind(MODEL, 10, 16).logprobs == -1


def test_the_prompts_log_probabilities_are_asked_for_once() -> None:
    for fields, expected in (
        ({"prompt_logprobs": 2}, 2), ({"echo": True}, -1), ({"echo": True, "logprobs": 4}, 4), ({"logprobs": 4}, -1),
        ({"echo": True, "logprobs": 4, "prompt_logprobs": 5}, 5),
        ({"echo": True, "logprobs": 4, "prompt_logprobs": 0}, 4),
    ):  # fmt: skip
        assert completion(**fields).decoding.bind(MODEL, 10, 16).prompt_logprobs == expected, fields
    refused(lambda: completion(prompt_logprobs=1, stream=True), "prompt_logprobs")


def test_no_token_is_a_limit_only_for_those_who_look_at_the_prompt() -> None:
    decoding = completion(max_tokens=0, echo=True, logprobs=0).decoding
    assert (decoding.max_tokens, decoding.bind(MODEL, 10, 16).max_tokens) == (0, 1)
    for fields in ({}, {"echo": True}, {"logprobs": 1}, {"prompt_logprobs": 1}):
        refused(lambda fields=fields: completion(max_tokens=0, **fields), "max_tokens")  # type: ignore[misc]
    refused(lambda: completion(max_tokens=0, echo=True, logprobs=0, min_tokens=1).decoding.bind(MODEL, 9, 16))
    refused(lambda: chat(max_tokens=0, logprobs=True), "max_tokens")


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1}, {"frequency_penalty": 1}, {"repetition_penalty": 1.1}, {"logit_bias": {"1": 1}},
        {"logprobs": 0}, {"prompt_logprobs": 0},
    ],
)  # fmt: skip
def test_what_beam_search_cannot_honour_is_refused(fields: dict[str, Any]) -> None:
    refused(lambda: completion(use_beam_search=True, n=2, **fields), next(iter(fields)))
    assert completion(use_beam_search=True, n=2).decoding.beam_width == 2


def test_switches_of_the_models_own_template() -> None:
    request = chat(chat_template_kwargs={"enable_thinking": False, "mode": "fast-1.0"})
    assert request.chat.template_kwargs == (("enable_thinking", False), ("mode", "fast-1.0"))


@pytest.mark.parametrize(
    "kwargs",
    [
        "x", [], {"chat_template": "x"}, {"tools": True}, {"add_generation_prompt": False}, {"eos_token": "x"},
        {"_x": True}, {"X": True}, {"x": 1}, {"x": None}, {"x": "a b"}, {"x": "<|im_end|>"}, {"x": "{{y}}"}, {"x": []},
        {"x" * 65: True}, {f"x{index}": True for index in range(9)},
    ],
)  # fmt: skip
def test_switches_that_are_none(kwargs: Any) -> None:
    refused(lambda: chat(chat_template_kwargs=kwargs), "chat_template_kwargs")


def test_errors_have_openais_codes() -> None:
    codes = {
        "missing_required_parameter": lambda: parse_completion({}, LIMITS),
        "invalid_type": lambda: completion(n="1"),
        "integer_below_min_value": lambda: completion(max_tokens=0),
        "integer_above_max_value": lambda: completion(logprobs=21),
        "decimal_above_max_value": lambda: completion(temperature=2.1),
        "decimal_below_min_value": lambda: completion(top_p=0),
        "string_above_max_length": lambda: completion(cache_salt="x" * 257),
        "unknown_parameter": lambda: completion(no_such_field=1),
        "unsupported_parameter": lambda: completion(suffix="x"),
    }
    for code, call in codes.items():
        assert refused(call).code == code
