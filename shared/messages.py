"""Every message that crosses the bus. Owns the wire format; knows no policy.

Wire form: a msgpack array ``[major, minor, message]``, the message itself an array with its tag first, then its fields
in the order below. Within one major version fields are only ever added at the end and with a default, so that nodes of
neighbouring minor versions work together: unknown trailing fields are ignored, missing ones take their defaults, and a
kind of message that is not known yet is dropped. A node drops every message of another major version.

Token ids of prompts travel packed (:func:`pack_tokens`): msgpack integers cost up to 5 bytes and a Python object each.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from shared.capacity import Capacity as Capacity
from shared.capacity import ModelInfo as ModelInfo
from shared.capacity import PoolInfo as PoolInfo
from shared.capacity import Role as Role
from shared.fetching import Fetch as Fetch
from shared.fetching import Fetched as Fetched
from shared.flight_record import AnswerTrace
from shared.message import Message as Message

PROTOCOL = (1, 1)
"""(major, minor) of this node; travels in every message."""

MAX_EPOCH = 1 << 53
"""No epoch comes near; a message that says so is noise, and must not fence the mesh off for ever."""


class Outcome(StrEnum):
    """What became of a submitted request. One closed set: the HTTP status, the metric label and the log field."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # this (request, attempt) is known already; it runs once
    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"  # prompt + max_tokens is over max_model_len
    NEVER_FITS = "never_fits"  # its worst case needs more KV blocks than the whole pool has
    NO_WORKER = "no_worker"  # no live worker serves the model
    UNKNOWN_MODEL = "unknown_model"
    DRAINING = "draining"
    STALE_EPOCH = "stale_epoch"  # sent to a scheduler that no longer leads, or does not yet
    INVALID = "invalid"
    DEADLINE = "deadline"  # predicted to miss its deadline


class EndReason(StrEnum):
    """Why a choice ended. ``stop`` and ``length`` have OpenAI's meaning."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Sampling(Message, frozen=True):
    """How one request's tokens are chosen.

    ``seed`` is always there: the gateway draws one at arrival where the client gave none, so that the tokens are a
    function of (seed, prompt index, choice, position) and survive a preemption or a change of worker.
    """

    seed: int  # 0 <= seed < 2**63
    max_tokens: int
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 means off
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    beam_width: int = 0  # > 0: beam search with so many beams; temperature and filters do not apply
    length_penalty: float = 1.0  # of beam search: score = log-probability / length ** length_penalty
    want_score: bool = False  # report the log-probability of each entry's tokens (best_of)
    presence_penalty: float = 0.0  # off the logit of every token that the output has (OpenAI)
    frequency_penalty: float = 0.0  # off it for each time that the output has it (OpenAI)
    # Of tokens that prompt or output have: positive logits / p, negative ones * p (CTRL).
    repetition_penalty: float = 1.0
    logit_bias: list[tuple[int, float]] = []  # (token id, added to its logit)
    # Of each output token, with so many alternatives; -1: none. Of the model, before all of the above.
    logprobs: int = -1
    # The same for the prompt's tokens, from the second on. What the prefix cache holds is not computed and has none:
    # whoever asks gives the request (and each attempt) a cache_salt of its own.
    prompt_logprobs: int = -1
    grammar: str = ""  # what the output must match, see shared.grammar; empty: anything


# --- gateway -> scheduler -------------------------------------------------------------------------------------------


class Submit(Message, frozen=True, tag="submit"):
    """One prompt with its ``n`` choices. Request/reply; idempotent on (request_id, attempt)."""

    request_id: str
    attempt: int
    gateway: str
    model: str
    prompt: bytes  # packed uint32, see pack_tokens
    sampling: Sampling
    arrival_ns: int  # gateway wall clock at first arrival: seniority, kept through resumes
    n: int = 1
    prompt_index: int = 0  # place in the client's list of prompts; part of the sampling key
    priority: int = 0  # lower runs first
    tenant: str = ""
    deadline_ns: int = 0  # unix ns by which it must have ended; 0: none
    cache_salt: str = ""
    traceparent: str = ""
    resumed: list[bytes] = []  # per choice: the tokens that the client already has (packed uint32)
    done_choices: list[int] = []  # choices that had ended before this attempt
    tenant_weight: int = 100  # percent of a normal tenant's share
    client_id: str = ""  # the client's X-Request-Id, or ours: for whoever explains the request; no decision reads it
    answer_id: str = ""  # the answer's ``id``, likewise; empty if nothing tells the client
    adapter: str = ""  # the LoRA adapter that it runs with; empty: none
    pool: str = ""  # the pool that it was asked to run in; empty: by its length


class SubmitReply(Message, frozen=True, tag="submit_reply"):
    outcome: Outcome
    epoch: int
    reason: str = ""
    queue_position: int = 0
    retry_after_ms: int = 0


class Cancel(Message, frozen=True, tag="cancel"):
    """Idempotent. An unknown id leaves a tombstone, so that a cancel may overtake its submit."""

    request_id: str
    attempt: int
    choice: int = -1  # -1: every choice


# --- scheduler -> worker --------------------------------------------------------------------------------------------


class SlotStart(Message, frozen=True):
    """A sequence joins the persistent batch. Its KV cache is empty: the plan's chunks compute it."""

    slot: int
    request_id: str
    attempt: int
    choice: int
    gateway: str
    tokens: bytes  # packed uint32: prompt, then the tokens generated before a preemption or a resume
    prompt_len: int
    pages: list[int]  # block table so far
    sampling: Sampling
    prompt_index: int = 0
    traceparent: str = ""
    computed: int = 0  # leading tokens whose KV is already in the pages (prefix cache)
    parent: int = -1  # fork: the slot whose tokens, block table and last logits of this step it shares
    adapter: str = ""  # the LoRA adapter that it runs with


class StepPlan(Message, frozen=True, tag="plan"):
    """What one iteration does, as a delta on the worker's persistent batch.

    Order of execution: drops, swap outs, copies (one after the other), swap ins, starts, page appends and replacements,
    feeds, then one forward pass over decodes, chunks and padding. Tokens are sampled for every decode, then for every
    chunk that reaches the end of its sequence's tokens, then for every fork (from its parent's logits), in plan order.
    """

    epoch: int
    worker: str
    incarnation: int
    step: int
    drops: list[int] = []  # slots that leave (cancelled, preempted); slots that the worker ended itself are not named
    starts: list[SlotStart] = []
    pages: list[tuple[int, list[int]]] = []  # (slot, pages appended to its block table)
    decodes: list[int] = []  # slots that run one token
    chunks: list[tuple[int, int]] = []  # (slot, prompt tokens to run)
    padding: list[tuple[int, int]] = []  # (slot, rows computed and thrown away): the static and dynamic baselines only
    copies: list[tuple[int, int]] = []  # (source page, target page), before anything is written
    backlog: bool = False  # work was in hand when the previous step ended: an idle gap before this step counts
    replaces: list[tuple[int, int, int]] = []  # (slot, index in its block table, page): copy-on-write
    feeds: list[tuple[int, int]] = []  # (slot, token) that beam search chose for it
    swap_outs: list[tuple[int, int]] = []  # (page, place in host memory)
    swap_ins: list[tuple[int, int]] = []  # (place in host memory, page)
    # (page, content hash) of pages that are whole once this step has run: the worker keeps them for a PageSnapshot.
    hashes: list[tuple[int, bytes]] = []
    fetches: list[Fetch] = []  # that begin once this plan's page moves are done
    # Fetches whose answers were heard: they are forgotten. One that still goes on is ended, and answered as any other.
    drop_fetches: list[int] = []


class Reset(Message, frozen=True, tag="reset"):
    """Forget every slot; the next plan is ``step``. Answered with a :class:`PageSnapshot`, each time that it comes.

    No plan is made for the worker before that answer: what its pages still hold is used again.
    """

    epoch: int
    worker: str
    incarnation: int
    step: int


# --- worker -> scheduler --------------------------------------------------------------------------------------------


class StepResult(Message, frozen=True, tag="result"):
    epoch: int
    worker: str
    incarnation: int
    step: int
    # One for each sampled row, in plan order; -1 where the slot had already ended, -2 for a beam.
    tokens: list[int]
    ended: list[tuple[int, str]] = []  # (slot, EndReason): EOS, stop ids and lengths are checked at the worker
    forward_us: int = 0  # from the plan's start to sampled tokens, less what it waited for the step before
    gap_us: int = 0  # how long the step loop was blocked for want of this plan, while plan.backlog
    rows: int = 0  # rows in the forward pass, padding included
    padding_rows: int = 0
    kv_bytes_copied: int = 0  # by copies in this step; joining and leaving never copy
    wait_us: int = 0  # how long the loop waited for this plan at all, backlog or not
    # Of each beam that ran: (slot, its best continuations, their log-probabilities).
    candidates: list[tuple[int, list[int], list[float]]] = []
    swap_us: int = 0  # spent on swaps in this step


class Need(Message, frozen=True, tag="need"):
    """The worker runs only step last+1 and has seen a later one: resend from ``step``."""

    epoch: int
    worker: str
    incarnation: int
    step: int


class WorkerFault(Message, frozen=True, tag="fault"):
    """A step failed. The worker has dropped its batch and waits for a :class:`Reset`."""

    epoch: int
    worker: str
    incarnation: int
    step: int
    reason: str


class PageSnapshot(Message, frozen=True, tag="pages"):
    """The answer to a :class:`Reset`: the batch is gone, and these pages hold whole blocks of known content.

    Only pages that a step has written to the end are named, and none that was given to somebody else since. Where
    all do not fit in one message the longest known are left out.
    """

    epoch: int
    worker: str
    incarnation: int
    step: int  # the reset's
    pages: bytes = b""  # packed uint32, see pack_tokens; the least recently hashed first
    hashes: bytes = b""  # DIGEST_BYTES (shared.page_hash) for each page


# --- worker -> gateway ----------------------------------------------------------------------------------------------


class TokenLogprob(Message, frozen=True):
    """Of one token: natural log-probabilities under the model, before temperature, penalties and filters."""

    log_prob: float
    rank: int = 0  # 1: the most probable token
    top_ids: list[int] = []  # the most probable tokens, best first
    top_log_probs: list[float] = []


class TokenEntry(Message, frozen=True):
    request_id: str
    attempt: int
    choice: int
    offset: int  # of the first token here, counted from the end of the prompt
    tokens: list[int]
    end: str = ""  # an EndReason in the entry that ends the choice, else empty
    count: int = 0  # with ``end``: how many tokens the choice has in all
    log_prob: float = 0.0  # where Sampling.want_score asks: the log-probabilities of ``tokens``, summed
    logprobs: list[TokenLogprob] = []  # one for each of ``tokens``, where Sampling asks for them
    # Of the prompt's tokens from ``prompt_offset`` (>= 1) on, where Sampling asks for them. They come in pieces, in
    # entries of choice 0 without tokens, all of them before any token of the output. Some may come again later, the
    # same (after a preemption, or from another choice). Cached tokens have none: see ``Sampling.prompt_logprobs``.
    prompt_logprobs: list[TokenLogprob] = []
    prompt_offset: int = 0
    cached: int = -1  # in the first entry of a choice: prompt tokens that the prefix cache held at admission
    reason: str = ""  # with ``end`` failed: why, for the client


class TokenBatch(Message, frozen=True, tag="tokens"):
    """One message per gateway per step (split only where it would exceed max_payload)."""

    epoch: int
    worker: str
    incarnation: int
    step: int
    entries: list[TokenEntry]


# --- scheduler -> gateway -------------------------------------------------------------------------------------------


class RequestEvent(Message, frozen=True, tag="event"):
    """``kind``: failed (final), dropped (final, by policy), lost (its worker or pages are gone: resume it), moved (it
    leaves a worker that is stopping: resume it)."""

    epoch: int
    kind: str
    request_id: str
    attempt: int
    choice: int
    reason: str


# --- presence -------------------------------------------------------------------------------------------------------


class WorkerBeat(Message, frozen=True, tag="worker_beat"):
    worker: str
    incarnation: int
    epoch: int  # highest seen
    state: WorkerState
    capacity: Capacity | None = None
    step: int = 0  # last step executed
    executing: int = 0  # step being executed, 0 if none
    executing_us: int = 0
    slots: int = 0
    fetched: list[Fetched] = []  # of the latest batch, not known to have been heard


class SchedulerBeat(Message, frozen=True, tag="scheduler_beat"):
    scheduler: str
    epoch: int
    models: list[ModelInfo]
    waiting: int = 0
    running: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    draining: bool = False


class GatewayBeat(Message, frozen=True, tag="gateway_beat"):
    gateway: str
    epoch: int  # highest seen
    live: list[tuple[str, int]] = []  # (request, attempt); attempt 0: it is being submitted just now
    partial: bool = False  # the list was cut to fit a message: absence proves nothing


class Answered(Message, frozen=True, tag="answered"):
    """A gateway tells the scheduler how the answer to a request went, for whoever explains it. May be lost."""

    answer: AnswerTrace


class RollCall(Message, frozen=True, tag="roll_call"):
    """A scheduler that starts asks everybody for a beat at once."""

    scheduler: str


AnyMessage = (
    Submit | SubmitReply | Cancel | StepPlan | Reset | StepResult | Need | WorkerFault | PageSnapshot | TokenBatch
    | RequestEvent | WorkerBeat | SchedulerBeat | GatewayBeat | RollCall | Answered | Fetched
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[int, int, AnyMessage]] = msgspec.msgpack.Decoder(tuple[int, int, AnyMessage])
_version = msgspec.msgpack.Decoder(tuple[int, int, msgspec.Raw])


class BadMessage(ValueError):
    """Bytes on the bus that are no message of ours: dropped and counted, never fatal."""


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode((*PROTOCOL, message))


def decode(payload: bytes) -> AnyMessage:
    """Decode and validate any message; :class:`BadMessage` if it is none, or of another major version."""
    try:
        major, _, message = _decoder.decode(payload)
        if major == PROTOCOL[0]:
            return message
        reason = ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
    raise BadMessage(_version_clash(payload) or reason)


def _version_clash(payload: bytes) -> str:
    """Why the sender's version may be what makes a message unreadable; empty if it is ours."""
    try:
        major, minor, _ = _version.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        return f"a message of protocol {major}.{minor}; this node speaks {PROTOCOL[0]}.{PROTOCOL[1]}"
    return ""


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32. Raises OverflowError for an id outside [0, 2**32)."""
    packed = array.array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of :func:`pack_tokens`. Raises BadMessage if the length is not a multiple of 4."""
    if len(data) % 4:
        raise BadMessage(f"packed tokens: {len(data)} bytes is not a multiple of 4")
    packed = array.array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
