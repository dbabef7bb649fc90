"""The model's tokenizer and chat template: text to ids, off the event loop, and the vocabulary for the way back.

Loading goes through ``transformers`` (it knows every model's quirks); afterwards only the ``tokenizers`` library is
used, whose calls release the GIL and are safe in several threads. ``transformers``' own wrapper is not: it changes
the shared tokenizer's truncation and padding on each call.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenizers import Tokenizer

from gateway.chat_messages import Chat
from gateway.detokenizer import Vocabulary
from gateway.errors import ApiError, invalid
from gateway.grammar_check import GrammarCheck
from gateway.parameters import Prompt
from gateway.plain_text import PlainText
from gateway.tool_template import ToolTemplate
from shared.lifecycle import StartupError
from shared.transformers_models import import_models

log = logging.getLogger("headrace.gateway")


class PromptTokenizer:
    """Tokenises prompts and chats for one model."""

    def __init__(self, tokenizer: Any, threads: int = 2, tool_call_parser: str = "auto") -> None:
        """``tokenizer``: a fast tokenizer of transformers (one that has a ``backend_tokenizer``).

        ``tool_call_parser``: a family of :data:`gateway.tool_parsers.PARSERS`, or ``auto``.
        """
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        self._backend: Tokenizer = backend
        self._template_owner = tokenizer
        self._plain_text = PlainText(backend)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self.vocabulary = Vocabulary(backend)
        self.grammars = GrammarCheck(backend.to_str(), tokenizer.eos_token_id)
        self.tools = ToolTemplate(tokenizer, tool_call_parser)
        self.tools.hidden = self.vocabulary.reveal(self.tools.markers)
        if not self._plain_text.available:
            log.warning("chat messages that spell a control token will be refused: the tokenizer cannot be copied")

    @classmethod
    def load(cls, model: str, threads: int = 2, tool_call_parser: str = "auto") -> PromptTokenizer:
        """The tokenizer of a local folder or a Hugging Face id; :class:`StartupError` if there is no usable one."""
        if not model:
            raise StartupError("--model is needed: the folder or Hugging Face id whose tokenizer to use")
        if os.path.isfile(os.path.expanduser(model)):
            raise StartupError(f"{model} is a file; 'headrace fetch-model {model}' makes a folder of a GGUF file")
        if model.startswith(("/", "./", "../", "~")) and not os.path.isdir(os.path.expanduser(model)):
            raise StartupError(f"model folder {model} does not exist")
        # Without torch transformers says at each start that models are not available; here none is wanted.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        import_models()
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(os.path.expanduser(model), trust_remote_code=False)
        except Exception as error:  # noqa: BLE001 - from_pretrained raises whatever its loaders raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise StartupError(f"no tokenizer in {model!r}: {reason}") from None
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise StartupError(f"the tokenizer of {model!r} is not one that the tokenizers library runs")
        loaded = cls(tokenizer, threads, tool_call_parser)
        loaded.grammars.prepare()
        return loaded

    @property
    def adds_special_tokens(self) -> bool:
        """An empty text has tokens: BOS, or the like."""
        return bool(self._backend.encode("").ids)

    def close(self) -> None:
        self.grammars.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def prompts(self, prompts: Sequence[Prompt], max_len: int, vocab_size: int) -> list[Sequence[int]]:
        """Each prompt's ids, checked against the model's ``vocab_size`` and context of ``max_len`` tokens."""
        for prompt in prompts:
            self._check_length(prompt, max_len)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(await self._in_thread(self._encode_texts, texts) if texts else [])
        result: list[Sequence[int]] = []
        for prompt in prompts:
            ids = next(encoded) if isinstance(prompt, str) else prompt
            if not ids:
                raise invalid("'prompt' is empty: it has no tokens", "prompt")
            if max(ids) >= vocab_size:
                raise invalid(f"'prompt' has the token id {max(ids)}; ids end at {vocab_size - 1}", "prompt")
            result.append(ids)
        return result

    async def chat(self, chat: Chat, max_len: int, vocab_size: int) -> list[int]:
        """The ids of a rendered conversation."""
        for text in chat.texts():
            self._check_length(text, max_len)
        ids: list[int] = await self._in_thread(self._encode_chat, chat)
        if not ids:
            raise invalid("the conversation has no tokens", "messages")
        if max(ids) >= vocab_size:
            raise invalid(f"the conversation has the token id {max(ids)}; ids end at {vocab_size - 1}", "messages")
        return ids

    async def tokenize(self, text: str, add_special_tokens: bool, max_len: int) -> list[int]:
        """The ids of any text, one without tokens included; a 400 if it surely exceeds ``max_len`` tokens."""
        self._check_length(text, max_len)
        ids: list[int] = await self._in_thread(
            lambda only: self._backend.encode_batch_fast([only], add_special_tokens=add_special_tokens)[0].ids, text
        )
        return ids

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        text: str = await self._in_thread(
            lambda ids: self._backend.decode(ids, skip_special_tokens=False), list(tokens)
        )
        return text

    def spellings(self, tokens: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return [self._backend.id_to_token(token) or "" for token in tokens]

    async def _in_thread(self, function: Any, argument: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, argument)

    def _check_length(self, prompt: Prompt, max_len: int) -> None:
        """Refuse what cannot fit before time is spent on it: no token is longer than the vocabulary's longest."""
        fewest_tokens = len(prompt)
        if isinstance(prompt, str):
            fewest_tokens //= self.vocabulary.longest_token_chars
        if fewest_tokens >= max_len:
            raise ApiError(
                400,
                f"the prompt has at least {fewest_tokens} tokens; the model's context is {max_len} tokens",
                code="context_length_exceeded",
            )

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=True)]

    def _encode_chat(self, chat: Chat) -> list[int]:
        self.tools.check(chat)
        conversation = [message.for_template() for message in chat.messages]
        tools = [tool.definition() for tool in chat.tools.tools]
        guarded = [self._guarded(message) for message in conversation]
        guarded_tools = self._plain_text.guard_tree(tools)
        spelled = guarded != conversation or guarded_tools != tools
        if spelled and not self._plain_text.available:
            raise invalid("a message spells one of the model's control tokens", "messages")
        text = self._render(chat, guarded, guarded_tools)
        if spelled:
            return self._plain_text.encode(text)
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _guarded(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the template gets it, in which nothing spells a control token."""
        guard = self._plain_text.guard
        if message["role"] == "tool":
            return {name: self._plain_text.guard_tree(value) for name, value in message.items()}
        guarded = {**message, "content": guard(message["content"])}
        if "tool_calls" in message:
            guarded["tool_calls"] = self._plain_text.guard_tree(message["tool_calls"])
        return guarded

    def _render(self, chat: Chat, conversation: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        if not self._template_owner.chat_template:
            raise invalid("the model has no chat template; use /v1/completions", "messages")
        try:
            rendered: str = self._template_owner.apply_chat_template(
                conversation,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **dict(chat.template_kwargs),
            )
        except Exception as error:  # noqa: BLE001 - templates raise what they like, e.g. for roles out of turn
            raise invalid(f"the chat template refuses the messages: {error}", "messages") from None
        return rendered
