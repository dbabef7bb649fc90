"""Every name that a span, an event or a log line carries: the one place that spells them.

``gen_ai.*`` are OpenTelemetry's semantic conventions for generative AI (semantic-conventions 1.41; their status is
*development*, so they may still change, here). ``headrace.*`` are ours. Spans of a request hang directly under its
server span, whichever service records them:

| span | recorded by | from - to |
|---|---|---|
| ``{operation} {model}`` | gateway | the request's head was in - the last byte was handed over; kind SERVER |
| ``receive`` | gateway | head in - body in |
| ``tokenize`` | gateway | text in - token ids out |
| ``stream`` | gateway | first token in - last byte handed over; events while the client takes nothing |
| ``resume`` | gateway | a loss noticed - the request's next token |
| ``queue`` | scheduler | submitted - admitted; an event each time that what it waits for changes |
| ``move`` | scheduler | last result at one worker in - first plan at another; why, where to, what was fetched |
| ``preempted`` | scheduler | left the batch - came back; why, for whom, and what it waited for |
| ``prefill`` | worker | first row - first token; an event for each chunk |
| ``decode`` | worker | first token - end, preemption or cancel |
| ``lost`` | scheduler | admitted - loss, where a worker took its own spans with it |
| ``step`` | worker | one iteration, a trace of its own, linked to its requests |
"""

from __future__ import annotations

# --- spans ----------------------------------------------------------------------------------------------------------

RECEIVE = "receive"
TOKENIZE = "tokenize"
STREAM = "stream"
RESUME = "resume"
QUEUE = "queue"
MOVE = "move"
PREEMPTED = "preempted"
PREFILL = "prefill"
DECODE = "decode"
LOST = "lost"
STEP = "step"

# --- events ---------------------------------------------------------------------------------------------------------

WAITS = "waits"  # LACK and IN_THE_WAY say for what, and behind whom
CHUNK = "chunk"  # prompt tokens computed in one iteration
CLIENT_SLOW = "client.slow"  # the client took nothing of what was there

# --- attributes of OpenTelemetry -------------------------------------------------------------------------------------

ERROR_TYPE = "error.type"
OPERATION_NAME = "gen_ai.operation.name"  # chat or text_completion
PROVIDER_NAME = "gen_ai.provider.name"
PROVIDER = "headrace"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# --- attributes of ours ---------------------------------------------------------------------------------------------

CLIENT_REQUEST_ID = "headrace.client_request_id"  # the caller's X-Request-Id, or what stands for it
REQUEST_ID = "headrace.request_id"  # as the mesh knows it: one for each prompt
CHOICE = "headrace.choice"
WORKER = "headrace.worker"
STEP_NUMBER = "headrace.step"
LACK = "headrace.lack"  # what it waits for (scheduler.core.sequence.Lack)
IN_THE_WAY = "headrace.in_the_way"  # the request that it waits behind
CAUSE = "headrace.cause"  # of a preemption or a loss
ATTEMPT = "headrace.attempt"  # the one that went on
TARGET = "headrace.target"  # of a move: the worker that goes on
MOVED_BYTES = "headrace.moved_bytes"  # KV blocks that were fetched for it
TRANSPORT = "headrace.transport"
PREEMPTED_BY = "headrace.preempted_by"  # the request whose growth it was
PREEMPTIONS = "headrace.preemptions"
QUEUE_POSITION = "headrace.queue_position"
END_REASON = "headrace.end_reason"
TOKENS = "headrace.tokens"
RECOMPUTES = "headrace.recomputes"  # a prefill that computes again what a preemption threw away
DURATION_MS = "headrace.duration_ms"
DECODES = "headrace.decodes"
PREFILL_TOKENS = "headrace.prefill_tokens"
PADDING_TOKENS = "headrace.padding_tokens"
IDLE_GAP_US = "headrace.idle_gap_us"
USUAL_US = "headrace.usual_us"  # what such an iteration takes of late
SLOW = "headrace.slow"
