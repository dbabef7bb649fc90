"""Whether a request can be taken at all: judged once, at submit, so that nothing hopeless ever waits."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.core.limits import Limits
from scheduler.core.sequence import pages_for
from shared.messages import BadMessage, Capacity, Outcome, Sampling, Submit, unpack_tokens


def max_model_len(capacity: Capacity, limits: Limits) -> int:
    """Longest prompt + output that a worker of this capacity is given, in tokens."""
    if limits.enable_chunked_prefill:
        return capacity.max_model_len
    return min(capacity.max_model_len, limits.step_tokens(capacity))  # a prompt runs in one step or never


def longest_sequence(capacity: Capacity, limits: Limits) -> int:
    """The same, clamped to what the KV blocks of such a worker hold. (Of the last token nothing is kept.)"""
    return min(max_model_len(capacity, limits), capacity.num_blocks * capacity.block_size + 1)


def unfinished(resumed: list[int], sampling: Sampling, eos_token_ids: Sequence[int]) -> list[int]:
    """The tokens of a resumed choice without the one that ends it, which is computed again, and its end with it.

    A choice's last token and its end come in one entry, so that no gateway should have the one without the other.
    """
    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops.update(eos_token_ids)
    most = sampling.max_tokens - 1
    ends = (place for place in range(sampling.min_tokens, min(len(resumed), most)) if resumed[place] in stops)
    return resumed[: next(ends, most)]


def judge(
    submit: Submit, capacities: Sequence[Capacity] | None, num_waiting: int, limits: Limits, waiting_tokens: int = 0
) -> tuple[Outcome, str, list[int]]:
    """(outcome, reason, prompt tokens). ``capacities`` are those of the model's live workers; None: no such model.
    Those without the request's adapter are none.

    ``num_waiting`` sequences wait, with ``waiting_tokens`` prompt tokens and max_tokens. All choices of a request find
    room in the queue, or none; what exceeds the bound on tokens by itself may wait if nothing else does. A request
    whose worst case, prompt + max_tokens - 1 KV entries, exceeds every pool is refused: it would hang alone, later.
    """
    if capacities is None:
        return Outcome.UNKNOWN_MODEL, f"no worker has served the model {submit.model!r}", []
    if not capacities:
        return Outcome.NO_WORKER, f"no live worker serves the model {submit.model!r}", []
    if submit.adapter:
        capacities = [capacity for capacity in capacities if submit.adapter in capacity.adapters]
        if not capacities:
            reason = f"no live worker of the model {submit.model!r} has the adapter {submit.adapter!r}"
            return Outcome.UNKNOWN_MODEL, reason, []
    try:
        tokens = unpack_tokens(submit.prompt)
        resumed = [unpack_tokens(packed) for packed in submit.resumed]
    except BadMessage as error:
        return Outcome.INVALID, str(error), []
    sampling = submit.sampling
    vocab_size = min(capacity.vocab_size for capacity in capacities)
    if not tokens or submit.n < 1 or sampling.max_tokens < 1:
        return Outcome.INVALID, "an empty prompt, n < 1 or max_tokens < 1", []
    if max(tokens) >= vocab_size or any(max(more, default=0) >= vocab_size for more in resumed):
        return Outcome.INVALID, f"a token id outside the model's vocabulary of {vocab_size}", []
    if any(len(more) > sampling.max_tokens for more in resumed):
        return Outcome.INVALID, "a resumed choice has more than max_tokens tokens", []
    total = len(tokens) + sampling.max_tokens
    longest = max(max_model_len(capacity, limits) for capacity in capacities)
    if total > longest:
        asked = f"the prompt has {len(tokens)} tokens and max_tokens is {sampling.max_tokens}"
        return Outcome.TOO_LONG, f"{asked}: {total} is over the limit of {longest} tokens (max_model_len)", []
    slots = max(limits.batch_slots(capacity) for capacity in capacities)
    if sampling.beam_width > slots:
        return Outcome.INVALID, f"{sampling.beam_width} beams; the batch holds {slots} sequences", []
    beams = max(1, sampling.beam_width)
    if not any(
        total <= max_model_len(c, limits)
        and beams <= limits.batch_slots(c)
        and beams * pages_for(total - 1, c.block_size) <= c.num_blocks
        for c in capacities
    ):
        return Outcome.NEVER_FITS, f"{total} tokens need more KV blocks than any worker's pool has", []
    sequences = 1 if sampling.beam_width else submit.n
    if sequences > limits.max_num_queued_reqs:  # for ever: no time to try again is told
        most = limits.max_num_queued_reqs
        return Outcome.INVALID, f"{sequences} choices; the queue holds {most} (--max-num-queued-reqs)", []
    if submit.attempt > 1:  # it was let in before: a resume takes its old place, however full the queue is by now
        return Outcome.ACCEPTED, "", tokens
    if num_waiting + sequences > limits.max_num_queued_reqs:
        return Outcome.QUEUE_FULL, f"{num_waiting} requests are waiting already", []
    need = len(tokens) + sampling.max_tokens * (sampling.beam_width or submit.n)
    if waiting_tokens and limits.max_num_queued_tokens and waiting_tokens + need > limits.max_num_queued_tokens:
        return Outcome.QUEUE_FULL, f"{waiting_tokens} tokens are waiting already", []
    return Outcome.ACCEPTED, "", tokens
