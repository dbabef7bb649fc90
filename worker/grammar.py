"""Grammars at the worker: which tokens may come next in a sequence whose output must match one (llguidance).

A :class:`Guide` follows one sequence. It is a function of the grammar and the output's token ids, so a sequence that
starts again in the middle gets a new one that is fed what was generated before. Compiling runs on a thread beside the
forward pass; a step waits :data:`COMPILE_WAIT_S` for all that it needs, and the engine's limits bound every mask
(:data:`shared.grammar.ENGINE_LIMITS`; the gateway has tried the grammar and found it quick). What goes wrong with a
grammar is a GrammarError: it ends the one sequence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.grammar import ENGINE_LIMITS, GrammarError, decode_grammar, engine_text
from worker.parallel.ranks import mine

log = logging.getLogger("headrace.worker.grammar")

COMPILE_WAIT_S = 2.0
"""From its beginning, a step waits no longer for grammars, however many join in it."""

TRIE_WAIT_S = 30.0
"""Nor longer for the tokenizer's trie, which is made once, while the worker starts."""

FOLLOWER_WAIT_S = 50.0
"""For either, on a rank that follows: where rank 0 has lost patience, no token of this one's counts."""

KEPT_GRAMMARS = 64
"""Compiled grammars that are kept for the next sequence with the same one (choices, resumes, one schema for all)."""


def load_engine_tokenizer(model: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The trie of the tokens of ``model``, a folder or Hugging Face id. GrammarError where its tokenizer gives none."""
    from llguidance.hf import from_tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise GrammarError("grammars need a model with a fast tokenizer")
        return from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)), list(eos_token_ids) or None)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if isinstance(error, GrammarError):
            raise
        log.warning("no grammars: the tokenizer can't be loaded: %s", type(error).__name__)
        raise GrammarError("this model's tokenizer can't be used for grammars") from error


class Grammars:
    """Compiles grammars for one model. ``load`` makes the tokenizer's trie, once, at the first need."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        self._load = load
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._tokenizer: Future[LLTokenizer] | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._deadline = 0.0  # of the step that runs, in monotonic seconds
        ranks = mine()
        self._follows = ranks is not None and ranks.rank > 0
        self._limits = LLParserLimits(**ENGINE_LIMITS)  # type: ignore[arg-type]

    def warm(self) -> None:
        """Make the trie now, in the background (a second for 50,000 tokens)."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._pool.submit(self._load)

    def begin_step(self) -> None:
        """From here on the step may wait for COMPILE_WAIT_S."""
        self._deadline = time.monotonic() + (FOLLOWER_WAIT_S if self._follows else COMPILE_WAIT_S)

    def wait_for(self, compiling: Future[LLMatcher]) -> LLMatcher:
        """What has been compiled, as long as the step may wait. Raises GrammarError."""
        assert self._tokenizer is not None
        try:
            if not self._tokenizer.done():
                self._tokenizer.exception(FOLLOWER_WAIT_S if self._follows else TRIE_WAIT_S)
                self.begin_step()
            return compiling.result(max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            raise GrammarError(f"the grammar did not compile within {COMPILE_WAIT_S:g} s") from None

    def again(self, text: str, output: Sequence[int]) -> LLMatcher:
        """Compile anew what is kept. Raises GrammarError."""
        self.begin_step()
        return self.wait_for(self._pool.submit(self.matcher, text, list(output), fresh=True))

    def guide(self, text: str, output: Sequence[int]) -> Guide:
        """Begin to compile ``text`` for a sequence that has generated ``output``; returns at once."""
        self.warm()
        tokens = list(output)
        return Guide(self, text, tokens, self._pool.submit(self.matcher, text, tokens))

    def matcher(self, text: str, output: Sequence[int], fresh: bool = False) -> LLMatcher:
        """A matcher behind ``output``; ``fresh`` compiles again what is kept. Raises GrammarError."""
        self.warm()
        assert self._tokenizer is not None
        tokenizer = self._tokenizer.result()
        with self._lock:
            kept = self._compiled.get(text) if not fresh else None
            if kept is not None:
                self._compiled.move_to_end(text)
        if kept is None:
            source = engine_text(decode_grammar(text))
            with _engine():
                kept = LLMatcher(tokenizer, source, log_level=0, limits=self._limits)
            _check(kept)
            with self._lock:
                self._compiled[text] = kept
                while len(self._compiled) > KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
        with _engine():
            matcher = kept.deep_copy()
            matcher.consume_tokens(list(output))
        _check(matcher)
        return matcher

    @property
    def tokenizer(self) -> LLTokenizer:
        """The trie, once it is there."""
        assert self._tokenizer is not None
        return self._tokenizer.result()


class Guide:
    """Implements :class:`~worker.batch.Guide`. Not thread-safe: it belongs to the step loop."""

    def __init__(self, grammars: Grammars, text: str, output: list[int], compiling: Future[LLMatcher]) -> None:
        self._grammars = grammars
        self._text = text
        self._output = output
        self._compiling = compiling
        self._matcher: LLMatcher | None = None

    def mask(self) -> npt.NDArray[np.uint8]:
        """A bit for each token that may come next, lowest bit first; at least one is set. Raises GrammarError."""
        if self._matcher is None:
            self._matcher = self._grammars.wait_for(self._compiling)
        bits = self._fill(self._matcher)
        if self._matcher.is_error():
            # The copies of a compiled grammar share a lexer whose states are limited: this may not be its own fault.
            self._matcher = self._grammars.again(self._text, self._output)
            bits = self._fill(self._matcher)
            _check(self._matcher)
        if not bits.any():
            raise GrammarError("no token can follow in the grammar")
        return bits

    def accept(self, token: int) -> bool:
        """See :meth:`worker.batch.Guide.accept`. The grammar is complete with an end token: only then may one come."""
        assert self._matcher is not None, "a token came before the mask that allows it"
        self._output.append(token)
        with suppress(GrammarError), _engine():  # an error stays with the matcher; the next mask tells
            self._matcher.consume_token(token)
        return token in self._grammars.tokenizer.eos_tokens

    def _fill(self, matcher: LLMatcher) -> npt.NDArray[np.uint8]:
        bits = np.zeros(-(-self._grammars.tokenizer.vocab_size // 32), dtype=np.int32)
        with _engine():
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits.view(np.uint8)


@contextmanager
def _engine() -> Iterator[None]:
    """A panic of the engine (no Exception, for Python) is a fault of this grammar, not of the batch."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise GrammarError("the grammar engine failed") from error


def _check(matcher: LLMatcher) -> None:
    """Raise GrammarError, one line, if the matcher has failed."""
    if matcher.is_error():
        lines = matcher.get_error().strip().splitlines()
        raise GrammarError(f"the grammar can't be used: {lines[0] if lines else 'no reason given'}"[:300])
