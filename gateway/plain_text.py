"""Keeps the spelling of control tokens in user text from becoming control tokens.

A chat template mixes its own control tokens with the text of users, and a tokenizer cannot tell them apart: text that
spells ``<|im_end|>`` would end the turn. Two steps undo that without changing how anything else is tokenised:

* before the template is rendered, :meth:`PlainText.guard` puts a mark inside each such spelling in a message;
* after it, the unmarked spellings are the template's own. They are renamed to what a twin of the tokenizer calls
  these tokens, the marks are removed, and the twin tokenises. The twin is the same tokenizer, but for these names.

Tool markers (``<tool_response>`` and the like) are often tokens without being control tokens. They are broken in
the same way, but only in what a tool said (:meth:`PlainText.guard_tree`): people may write them on purpose.

Marks and names are random and per process, so no text can contain them. Texts without such spellings never come here.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer


def _random_mark() -> str:
    """Eight private-use characters: they survive normalisation and templates, and nobody can guess them."""
    return "".join(chr(0xE000 + secrets.randbelow(0x1000)) for _ in range(8))


def _any_of(spellings: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted(set(spellings), key=lambda text: (-len(text), text))
    return re.compile("|".join(re.escape(spelling) for spelling in ordered)) if ordered else None


def _starts_of(spelled: re.Pattern[str] | None) -> re.Pattern[str] | None:
    """A look-ahead finds overlapping spellings too; each is broken behind its first character."""
    return None if spelled is None else re.compile(f"(?=(?:{spelled.pattern}))(?s:.)")


class PlainText:
    """The control tokens of one tokenizer, and its twin. Thread-safe: nothing changes after construction."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        control = {id_: token.content for id_, token in added.items() if token.special}
        renamed = control | {id_: token.content for id_, token in added.items() if "tool" in token.content.lower()}
        self._control = _any_of(control.values())
        self._any = _any_of(renamed.values())
        self._control_starts = _starts_of(self._control)
        self._any_starts = _starts_of(self._any)
        self._break = _random_mark()
        self._name = _random_mark()
        self._twin = self._make_twin(tokenizer, renamed) if all(len(text) > 1 for text in renamed.values()) else None

    @property
    def available(self) -> bool:
        """False where no faithful twin can be made: then texts with such spellings have to be refused."""
        return self._any is None or self._twin is not None

    def spells_control_tokens(self, text: str) -> bool:
        return self._control is not None and self._control.search(text) is not None

    def guard(self, text: str) -> str:
        """``text`` with every spelling of a control token broken; the same text if there is none."""
        return self._broken(text, self._control, self._control_starts)

    def guard_tree(self, tree: Any) -> Any:
        """A JSON value whose strings, keys too, are guarded, against the spelling of tool markers as well."""
        if isinstance(tree, str):
            return self._broken(tree, self._any, self._any_starts)
        if isinstance(tree, list):
            return [self.guard_tree(item) for item in tree]
        if isinstance(tree, dict):
            return {self.guard_tree(key): self.guard_tree(value) for key, value in tree.items()}
        return tree

    def _broken(self, text: str, spelled: re.Pattern[str] | None, starts: re.Pattern[str] | None) -> str:
        if spelled is None or starts is None or spelled.search(text) is None:
            return text
        return starts.sub(lambda match: match.group() + self._break, text)

    def encode(self, guarded: str) -> list[int]:
        """Token ids of a rendered template whose messages were guarded."""
        if self._twin is None or self._any is None:
            raise ValueError("this tokenizer has no twin")
        renamed = self._any.sub(lambda match: self._name + match.group(), guarded)
        ids: list[int] = self._twin.encode_batch_fast([renamed.replace(self._break, "")], add_special_tokens=False)[
            0
        ].ids
        return ids

    def _make_twin(self, tokenizer: Tokenizer, special: dict[int, str]) -> Tokenizer | None:
        """The tokenizer with its control tokens renamed, ids unchanged; None if that cannot be had."""
        spec: dict[str, Any] = json.loads(tokenizer.to_str())
        spec["post_processor"] = None  # it only adds BOS and EOS, which a template spells itself
        spec["truncation"] = spec["padding"] = None
        for token in spec["added_tokens"]:
            if token["id"] in special:
                token["content"] = self._name + token["content"]
        vocab = spec["model"].get("vocab")
        if isinstance(vocab, dict):
            for id_, content in special.items():
                vocab.pop(content, None)
                vocab[self._name + content] = id_
        elif isinstance(vocab, list):
            for id_, content in special.items():
                if id_ < len(vocab):
                    vocab[id_][0] = self._name + content
        if spec["model"].get("unk_token") in special.values():
            spec["model"]["unk_token"] = self._name + spec["model"]["unk_token"]
        try:
            twin = Tokenizer.from_str(json.dumps(spec))
        except Exception:  # noqa: BLE001 - tokenizers raises bare Exception for what it cannot load
            return None
        faithful = all(twin.token_to_id(self._name + content) == id_ for id_, content in special.items())
        return twin if faithful and twin.get_vocab_size() == tokenizer.get_vocab_size() else None
