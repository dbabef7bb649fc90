"""Incremental detokenising: joined, the pieces are the decoding of all ids, and none ends in half a character.

Two kinds of vocabulary need two ways. Both cost O(1) amortised for a token:

* *Byte-level* (GPT-2's and most models'): every token is a string of bytes, and decoding is UTF-8 over all of them. An
  incremental UTF-8 decoder holds at most three bytes back. Broken sequences become U+FFFD as in the full decoding:
  both replace each maximal subpart (Unicode 15, section 3.9).
* *Everything else* (SentencePiece's, WordPiece): decoding is local except at the text's start (a leading space is
  stripped) and in runs of byte tokens (``<0x0A>``), which are text or U+FFFD as a whole. So new tokens are decoded
  behind an *anchor*, an earlier token that is ordinary text, and a run of byte tokens is held until it ends.

A text that continues a prompt starts behind the prompt's last ordinary token, so that its leading space is kept.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any, Protocol

from tokenizers import Tokenizer, pre_tokenizers

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_ANCHOR_SEARCH = 64  # tokens of a prompt's end that are looked through for an anchor


class Detokenizer(Protocol):
    """One text in the making."""

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that is settled now that ``tokens`` have come."""
        ...

    def finish(self) -> str:
        """What was held back. The text has ended."""
        ...


class Vocabulary:
    """What detokenising needs of a tokenizer: each id's bytes or kind, looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_tokens: dict[int, str] = {
            id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        tokens = {id_: token for token, id_ in vocab.items()}
        tokens.update({id_: token.content for id_, token in added.items()})
        self._decoder = json.loads(tokenizer.to_str())["decoder"]
        special = self.special_tokens
        self._bytes: dict[int, bytes] | None = None
        self._bytes_and_special: dict[int, bytes] = {}  # made when it is first asked for
        self._bytes_and_markers: dict[int, bytes] = {}
        self._visible_and_markers: frozenset[int] = frozenset()
        self._markers: dict[int, str] = {}
        self._visible: frozenset[int] = frozenset()
        self._byte_tokens: dict[int, bytes] = {}
        self._anchor: list[int] = []  # some token of ordinary text
        self._text_bytes: dict[int, bytes] = {}  # of tokens of ordinary text that were asked for
        if _is_byte_level(self._decoder):
            self._bytes = {id_: _token_bytes(token) for id_, token in tokens.items() if id_ not in special}
        else:
            self._visible = frozenset(tokens) - special.keys()
            self._byte_tokens = {
                id_: bytes.fromhex(tokens[id_][3:5])
                for id_ in self._visible
                if _BYTE_TOKEN.fullmatch(tokens[id_]) is not None
            }
            self._anchor = [next((id_ for id_ in sorted(self._visible) if id_ not in self._byte_tokens), 0)]
        self.longest_token_chars = max((len(token) for token in tokens.values()), default=1)

    def reveal(self, spellings: Collection[str]) -> tuple[str, ...]:
        """Make the special tokens among ``spellings`` the markers that a detokenizer shows where it is asked to."""
        self._markers = {id_: text for id_, text in self.special_tokens.items() if text in spellings}
        if self._bytes is not None and self._markers:
            self._bytes_and_markers = self._bytes | {id_: text.encode() for id_, text in self._markers.items()}
        self._visible_and_markers = self._visible | self._markers.keys()
        return tuple(self._markers.values())

    def detokenizer(self, prompt: Sequence[int], special_tokens: bool = False, markers: bool = False) -> Detokenizer:
        """A detokenizer for a text that continues ``prompt``, in which ``special_tokens`` are shown or not.

        ``markers``: of the special tokens only those of :meth:`reveal` are.
        """
        markers = markers and bool(self._markers) and not special_tokens
        if self._bytes is not None:
            if markers:
                return _ByteLevelDetokenizer(self._bytes_and_markers)
            return _ByteLevelDetokenizer(self._with_special(self._bytes) if special_tokens else self._bytes)
        visible = self._visible | self.special_tokens.keys() if special_tokens else self._visible
        if markers:
            visible = self._visible_and_markers
        anchor: list[int] = []
        for token in reversed(prompt[-_MAX_ANCHOR_SEARCH:]):
            if token in visible and token not in self._byte_tokens:
                anchor = [token]
                break
        decode = self._decode_all if special_tokens or markers else self._decode
        return _AnchoredDetokenizer(decode, visible, self._byte_tokens.keys(), anchor)

    def token_bytes(self, token: int) -> bytes:
        """What a token alone adds to a text that has begun; a special token's spelling; nothing for an unknown id.

        It may be a part of a character. Joined, the bytes of a text's tokens are the text.
        """
        spelling = self.special_tokens.get(token)
        if spelling is not None:
            return spelling.encode("utf-8", "replace")
        if self._bytes is not None:
            return self._bytes.get(token, b"")
        if token in self._byte_tokens:
            return self._byte_tokens[token]
        if token not in self._visible:
            return b""
        if token not in self._text_bytes:
            text = self._decode([*self._anchor, token])[len(self._decode(self._anchor)) :]
            self._text_bytes[token] = text.encode("utf-8", "replace")
        return self._text_bytes[token]

    def _with_special(self, token_bytes: dict[int, bytes]) -> dict[int, bytes]:
        if not self._bytes_and_special:
            spelled = {id_: text.encode("utf-8", "replace") for id_, text in self.special_tokens.items()}
            self._bytes_and_special = token_bytes | spelled
        return self._bytes_and_special

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _decode_all(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


class _ByteLevelDetokenizer:
    __slots__ = ("_bytes", "_utf8")

    def __init__(self, token_bytes: dict[int, bytes]) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        get = self._bytes.get
        return self._utf8.decode(b"".join([get(token, b"") for token in tokens]))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class _AnchoredDetokenizer:
    __slots__ = ("_anchor", "_anchor_text", "_byte_tokens", "_decode", "_pending", "_visible")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        visible: Set[int],
        byte_tokens: Set[int],
        anchor: list[int],
    ) -> None:
        self._decode = decode
        self._visible = visible
        self._byte_tokens = byte_tokens
        self._anchor = anchor
        self._anchor_text = decode(anchor) if anchor else ""
        self._pending: list[int] = []

    def feed(self, tokens: Iterable[int]) -> str:
        # Ids that decoding skips (special, unknown) do not end a run of bytes either, so they are dropped first.
        new = [token for token in tokens if token in self._visible]
        if not new:
            return ""
        self._pending += new
        if new[-1] in self._byte_tokens:
            return ""
        return self._settle()

    def finish(self) -> str:
        return self._settle() if self._pending else ""

    def _settle(self) -> str:
        text = self._decode(self._anchor + self._pending)[len(self._anchor_text) :]
        last = self._pending[-1]
        if last not in self._byte_tokens:
            self._anchor = [last]
            self._anchor_text = self._decode(self._anchor)
        self._pending.clear()
        return text


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        kinds = {inner["type"] for inner in decoder["decoders"]}
        return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}
    return bool(decoder["type"] == "ByteLevel")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019, ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in table.values())
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    return table


_BYTES = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """A token's bytes: through the alphabet if all its characters are in it, else its own UTF-8."""
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")
