"""Small tokenizers of the kinds that detokenising tells apart."""

from __future__ import annotations

from tiny_models import make_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

_WORDS = ["▁hello", "▁wor", "ld", "▁a", "b", "c", ".", "▁", "é", "▁é", "x"]


def byte_level() -> Tokenizer:
    """GPT-2's kind."""
    return make_tokenizer().backend_tokenizer


def _byte_fallback_vocab() -> list[tuple[str, float]]:
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    return vocab + [(word, -float(len(_WORDS) - index)) for index, word in enumerate(_WORDS)]


def llama_style() -> Tokenizer:
    """SentencePiece with byte fallback as Llama 2 has it: a leading space is stripped from the whole text."""
    tokenizer = Tokenizer(models.Unigram(_byte_fallback_vocab(), unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    """SentencePiece through the Metaspace pair."""
    tokenizer = Tokenizer(models.Unigram(_byte_fallback_vocab(), unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {"[UNK]": 0, "hello": 1, "##ing": 2, "wor": 3, "##ld": 4, ".": 5, "'": 6, "s": 7}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[UNK]", special=True)])
    return tokenizer


KINDS = {"byte_level": byte_level, "llama_style": llama_style, "metaspace": metaspace, "word_piece": word_piece}
