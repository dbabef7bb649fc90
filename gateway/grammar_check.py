"""Tries a grammar before its request is submitted: what the engine refuses, or is slow at, is a 400 here.

The engine (llguidance) compiles lazily, so compiling alone proves little: a few short texts are also walked through,
as sampling would, and each mask must come within :data:`MAX_STEP_CPU_S`. All of it runs on threads of its own; the
engine lets go of the GIL and its limits (:data:`shared.grammar.ENGINE_LIMITS`) bound every call. Results are kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from gateway.errors import invalid, unavailable
from gateway.structured import Constraint
from shared.grammar import ENGINE_LIMITS, GrammarError, decode_grammar, engine_text
from shared.messages import Outcome

log = logging.getLogger("headrace.gateway")

THREADS = 2
MAX_STEP_CPU_S = 0.1
"""CPU seconds for compiling or for one mask. The worker computes masks between two forward passes, for everybody."""

MAX_CHECK_S = 0.8
"""A client waits no longer for the verdict on its grammar."""

MAX_QUEUE_S = 5.0
"""Nor longer for its turn, when others keep the threads busy."""

KEPT_VERDICTS = 512
WALKS = 2
WALK_STEPS = 16
_MAX_REASON_CHARS = 300
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")  # as the engine puts it


class GrammarCheck:
    """Verdicts on grammars for one tokenizer."""

    def __init__(self, tokenizer_json: str, eos_token: int | None) -> None:
        """``tokenizer_json``: as the tokenizers library writes it. The engine's trie is made at first need."""
        self._source = tokenizer_json
        self._eos_token = eos_token
        self._tokenizer: LLTokenizer | None = None
        self._making = threading.Lock()
        self._limits = LLParserLimits(**ENGINE_LIMITS)  # type: ignore[arg-type]
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._free = asyncio.Semaphore(THREADS)
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # digest -> what is wrong; empty: nothing

    def prepare(self) -> None:
        """Make the engine's trie now, and not while requests wait. Blocks; logs if there can be none."""
        try:
            self.warm()
        except Exception as error:  # noqa: BLE001 - whatever the engine dislikes about a tokenizer
            log.warning("no structured output: the grammar engine cannot use the tokenizer: %s", error)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def check(self, constraint: Constraint) -> None:
        """Refuse a grammar that cannot be used."""
        if not constraint.grammar:
            return
        digest = hashlib.blake2b(constraint.grammar.encode("utf-8", "replace"), digest_size=16).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            verdict = await self._try(constraint.grammar, digest)
        else:
            self._verdicts.move_to_end(digest)
        if verdict:
            raise invalid(f"'{constraint.field}': {verdict}", constraint.field)

    async def _try(self, grammar: str, digest: bytes) -> str:
        try:
            async with asyncio.timeout(MAX_QUEUE_S):
                await self._free.acquire()
        except TimeoutError:
            raise unavailable("too many grammars are being compiled", Outcome.QUEUE_FULL.value) from None
        first = self._tokenizer is None  # it waits for the engine's trie as well
        work = asyncio.get_running_loop().run_in_executor(self._pool, self.verdict, grammar)
        work.add_done_callback(lambda done: self._settle(done, digest))
        try:
            async with asyncio.timeout(MAX_QUEUE_S if first else MAX_CHECK_S):
                return await asyncio.shield(work)
        except TimeoutError:
            return "the grammar takes too long to compile"

    def _settle(self, work: asyncio.Future[str], digest: bytes) -> None:
        """The thread is done, whether or not anybody still waits for it."""
        self._free.release()
        if work.cancelled() or work.exception() is not None:
            return
        self._verdicts[digest] = work.result()
        while len(self._verdicts) > KEPT_VERDICTS:
            self._verdicts.popitem(last=False)

    def verdict(self, grammar: str) -> str:
        """What is wrong with it; empty if nothing is. Blocks; bounded by the engine's limits."""
        try:
            source = engine_text(decode_grammar(grammar))
        except GrammarError as error:
            return str(error)
        try:
            return self._walk(source)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the engine's, which is no Exception for Python
                raise
            return "the grammar engine failed"

    def warm(self) -> LLTokenizer:
        """The engine's trie, made by the first call, which blocks for up to a second with a large vocabulary."""
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(self._source, eos_token=self._eos_token)
            return self._tokenizer

    def _walk(self, source: str) -> str:
        try:
            tokenizer = self.warm()
        except Exception:  # noqa: BLE001 - as above
            return "structured output is not supported: the grammar engine cannot use this model's tokenizer"
        clock = _Clock()
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            return _why(matcher.get_error())
        slow = clock.slow()
        draw = random.Random(0)
        for _ in range(WALKS):
            for _ in range(WALK_STEPS):
                clock.start()
                mask: bytes = matcher.compute_logit_bias()
                slow = slow or clock.slow()
                if matcher.is_error():
                    return _why(matcher.get_error())
                if slow:
                    return "the grammar is too complex: it would slow every request down"
                token = _any_allowed(mask, draw)
                if token < 0:
                    return "the grammar cannot be satisfied"
                if token in tokenizer.eos_tokens:
                    break
                clock.start()
                matcher.consume_token(token)
                slow = clock.slow()
            matcher.reset()
        return ""


class _Clock:
    """CPU seconds of this thread: what others do on the machine does not count."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._began_s = time.thread_time()

    def slow(self) -> bool:
        return time.thread_time() - self._began_s > MAX_STEP_CPU_S


def _any_allowed(mask: bytes, draw: random.Random) -> int:
    """A token whose entry is not 0, from a place drawn at random on; -1 if there is none."""
    start = draw.randrange(len(mask))
    found = mask.find(b"\xc8", start)  # 200: allowed
    return found if found >= 0 else mask.find(b"\xc8")


def _why(error: str) -> str:
    """The engine's refusal in the words of those who wrote the schema."""
    if found := _UNIMPLEMENTED.search(error):
        keywords = ", ".join(re.findall(r'"([^"]*)"', found[1]))
        return f"keywords that are not supported: {keywords[:_MAX_REASON_CHARS]}"
    return f"the grammar cannot be used: {_one_line(error)}"


def _one_line(text: str) -> str:
    if text.startswith("NoExtension"):  # the engine's name for it
        return "nothing can match it"
    return " ".join(text.replace("<non-verbose/>", "").split())[:_MAX_REASON_CHARS]
