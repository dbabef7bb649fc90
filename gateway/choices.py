"""Makes what a request's choices need: the way from tokens to text that the client asked for, and what is told of the
prompt."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.choice_text import ChoiceText, DetailedChoiceText, NoText
from gateway.decoding import Decoding
from gateway.detokenizer import Vocabulary
from gateway.errors import invalid
from gateway.report import Report
from gateway.token_details import PromptReport

MAX_TOLD = 500_000
"""Log-probabilities, alternatives included, and token ids that one answer may hold: some 100 bytes of memory each."""


def check_told(decoding: Decoding, report: Report, max_tokens: int, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse an answer that could tell more of its tokens than one request may hold in memory."""
    told = 0
    if report.per_token:
        told += len(prompts) * decoding.samples * max_tokens * (1 + max(0, report.logprobs))
    if report.from_the_mesh >= 0:  # told again with each choice
        told += sum(map(len, prompts)) * decoding.samples * (1 + report.from_the_mesh)
    if told > MAX_TOLD:
        asked = ((report.logprobs, "logprobs"), (report.prompt_logprobs, "prompt_logprobs"))
        name = max(asked)[1] if max(asked)[0] >= 0 else "return_token_ids"
        raise invalid(
            f"'{name}' could ask for {told} values in one answer; at most {MAX_TOLD} are told: ask for fewer "
            "alternatives, tokens or choices",
            name,
        )


def prompt_report(
    report: Report, source: str | Sequence[int], ids: Sequence[int], vocabulary: Vocabulary
) -> PromptReport | None:
    """What will be told of the prompt ``ids``; None if nothing. ``source``: the client's text, or its ids."""
    if not (report.echo or report.token_ids or report.from_the_mesh >= 0):
        return None
    echo = ""
    if report.echo:
        if isinstance(source, str):
            echo = source
        else:
            detokenizer = vocabulary.detokenizer((), report.special_tokens)
            echo = detokenizer.feed(ids) + detokenizer.finish()
    return PromptReport(ids, echo)


def choice_text(
    decoding: Decoding, report: Report, ids: Sequence[int], prompt: PromptReport | None, vocabulary: Vocabulary
) -> ChoiceText:
    """For one choice that continues the prompt ``ids``."""
    detokenizer = vocabulary.detokenizer(ids, report.special_tokens, report.markers)
    stop, include_stop, min_tokens = decoding.stop, decoding.include_stop, decoding.min_tokens
    if decoding.max_tokens == 0:
        return NoText(detokenizer, stop, include_stop, min_tokens)
    if not report.per_token:
        return ChoiceText(detokenizer, stop, include_stop, min_tokens)
    offset = len(prompt.echo) if prompt is not None else 0
    return DetailedChoiceText(detokenizer, stop, include_stop, min_tokens, offset)
