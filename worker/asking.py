"""What the sequences of a step ask of whoever samples for them, whatever device they run on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shared.grammar import GrammarError
from shared.messages import Sampling
from worker.batch import Row, Slot, Step
from worker.grammar import Grammars, Guide
from worker.processors import Shape, asks_for_counts, bias_of
from worker.token_counts import TokenCounts


def begin_guides(step: Step, grammars: Grammars) -> None:
    """Have the grammars of sequences that have just joined compiled beside the forward pass."""
    for slot in [row.slot for row in step.rows] + [slot for _, slot in step.forks]:
        if slot.sampling.grammar and slot.guide is None and not slot.sampling.beam_width:
            grammars.begin_step()
            slot.guide = grammars.guide(slot.sampling.grammar, slot.tokens[slot.prompt_len :])


def banned_tokens(
    sampling: Sampling, generated: int, eos_token_ids: Collection[int], vocab_size: int
) -> tuple[int, ...]:
    """Tokens that would end a sequence before it has its min_tokens (its grammar, if it ignores EOS)."""
    if generated >= sampling.min_tokens:
        return tuple(eos_token_ids) if sampling.ignore_eos and sampling.grammar else ()
    ends = () if sampling.ignore_eos and not sampling.grammar else eos_token_ids
    return tuple(token for token in {*ends, *sampling.stop_token_ids} if 0 <= token < vocab_size)


def shape_of(slot: Slot, banned: Sequence[int], vocab_size: int, failures: dict[int, str], index: int) -> Shape | None:
    """What changes the slot's logits; None for most. A grammar that fails goes into ``failures``, by ``index``."""
    sampling = slot.sampling
    allowed = None
    if isinstance(slot.guide, Guide):
        try:
            allowed = slot.guide.mask()
        except GrammarError as error:
            failures[index] = str(error)
    if asks_for_counts(sampling):
        if slot.counts is None:
            slot.counts = TokenCounts(slot.prompt_len, with_prompt=sampling.repetition_penalty != 1)
        slot.counts.follow(slot.tokens)
    if sampling.logit_bias and slot.bias is None:
        slot.bias = bias_of(sampling, vocab_size)
    if slot.counts is None and slot.bias is None and allowed is None and not banned:
        return None
    return Shape(sampling, banned, slot.counts, allowed, slot.bias)


def prompt_rows(rows: Sequence[Row]) -> list[tuple[int, Row, int]]:
    """(index in ``rows``, row, leading query tokens) whose logits are wanted for the prompt's log-probabilities."""
    asking = [
        (index, row, row.slot.prompt_rows(row.start, row.count))
        for index, row in enumerate(rows)
        if row.slot.sampling.prompt_logprobs >= 0 and not row.padding
    ]
    return [one for one in asking if one[2]]
