"""Keeps the spelling of control tokens in user text from becoming control tokens.

A chat template mixes its own control tokens with the text of users, and a tokenizer cannot tell them apart: text that
spells ``<|im_end|>`` would end the turn. Two steps undo that without changing how anything else is tokenised:

* before the template is rendered, :meth:`PlainText.guard` puts a mark inside each such spelling in a message;
* after it, the unmarked spellings are the template's own. They are renamed to what a twin of the tokenizer calls
  these tokens, the marks are removed, and the twin tokenises. The twin is the same tokenizer, but for these names.

Marks and names are random and per process, so no text can contain them. Texts without such spellings never come here.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from tokenizers import Tokenizer


def _random_mark() -> str:
    """Eight private-use characters: they survive normalisation and templates, and nobody can guess them."""
    return "".join(chr(0xE000 + secrets.randbelow(0x1000)) for _ in range(8))


class PlainText:
    """The control tokens of one tokenizer, and its twin. Thread-safe: nothing changes after construction."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        spellings = sorted(set(special.values()), key=lambda text: (-len(text), text))
        alternatives = "|".join(re.escape(spelling) for spelling in spellings)
        self._any = re.compile(alternatives) if spellings else None
        # A look-ahead finds overlapping spellings too; each is broken behind its first character.
        self._starts = re.compile(f"(?=(?:{alternatives}))(?s:.)") if spellings else None
        self._break = _random_mark()
        self._name = _random_mark()
        self._twin = self._make_twin(tokenizer, special) if all(len(text) > 1 for text in spellings) else None

    @property
    def available(self) -> bool:
        """False where no faithful twin can be made: then texts with such spellings have to be refused."""
        return self._any is None or self._twin is not None

    def spells_control_tokens(self, text: str) -> bool:
        return self._any is not None and self._any.search(text) is not None

    def guard(self, text: str) -> str:
        """``text`` with every spelling of a control token broken; the same text if there is none."""
        if self._starts is None or not self.spells_control_tokens(text):
            return text
        return self._starts.sub(lambda match: match.group() + self._break, text)

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
