"""Token ids for chat prompts: control tokens where the template has them, and nowhere else.

A prompt comes in parts, ids of control tokens and texts between them:

    [1, "user\\nWhat does <|im_end|> mean?", 2, "\\n", 1, "assistant\\n"]

Texts are encoded as Hugging Face encodes them between parsed control tokens, except that a text which spells a control
token stays a text. Two ways lead a text to a control token in the libraries, and both are closed here: added tokens
that the checkpoint does not call special, and user-defined pieces of sentencepiece. Of these, what looks like a marker
("<|im_start|>", "[INST]") counts as control token; the others (runs of spaces, added words) are text like all text.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from engine.tokenizer import JsonTokenizer, SentencePieceTokenizer, Tokenizer, encode_parts, splitter

_MARKER = re.compile(r"<.+>|\[.+\]|\{.+\}", re.DOTALL)


class _SentencePieceEncoder:
    """Encodes with a copy of the model in which markers are control pieces, which sentencepiece never finds in text."""

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        from sentencepiece import SentencePieceProcessor

        self._tokenizer = tokenizer
        model = tokenizer._model
        data, markers = _without_markers(model)
        self._model = SentencePieceProcessor(model_proto=data) if markers else model
        unusual = [i for i in range(model.get_piece_size()) if model.is_control(i) or model.is_unknown(i)]
        self.control_tokens: dict[str, int] = {model.id_to_piece(i): i for i in unusual}
        self.control_tokens |= {marker: model.piece_to_id(marker) for marker in markers}
        for token in tokenizer.added_tokens:
            if token.special or (_MARKER.fullmatch(token.content) and not tokenizer._is_piece(token)):
                self.control_tokens[token.content] = token.id
        words = {text: i for i, text in tokenizer._added.items() if text and text not in self.control_tokens}
        self._split = splitter(words)

    def encode(self, parts: list[str | int], spaced: bool | None = None) -> list[int]:
        spaced = self._tokenizer._spaced if spaced is None else spaced
        split = [piece for part in parts for piece in ([part] if isinstance(part, int) else self._split(part))]
        return encode_parts(self._model, split, spaced)


class _JsonEncoder:
    """Encodes the whole prompt at once, with an alias in place of each control token, so that the library itself deals
    with what surrounds a token (leading spaces, stripping). The aliases belong to a copy of the tokenizer to which
    every control token is text; a random number keeps them out of any text."""

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        import tokenizers

        self._tokenizer = tokenizer
        added = tokenizer._model.get_added_tokens_decoder()
        self.control_tokens: dict[str, int] = {
            token.content: i for i, token in added.items() if token.special or _MARKER.fullmatch(token.content)
        }
        described = json.loads(tokenizer._model.to_str())
        for token in described["added_tokens"]:
            token["special"] = token["content"] in self.control_tokens
        self._model = tokenizers.Tokenizer.from_str(json.dumps(described))
        self._model.encode_special_tokens = True
        secret = secrets.token_hex(16)
        self._aliases = {i: f"\ufdd0{secret}.{i}\ufdd1" for i in self.control_tokens.values()}
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        aliases = [
            tokenizers.AddedToken(alias, special=False, **{flag: getattr(added[i], flag) for flag in flags})
            for i, alias in self._aliases.items()
        ]
        self._model.add_tokens(aliases)
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self._ids = {vocabulary[alias]: i for i, alias in self._aliases.items()}

    def encode(self, parts: list[str | int], spaced: bool | None = None) -> list[int]:
        self._tokenizer.encode("".join(part for part in parts if isinstance(part, str)))  # refuses what it cannot spell
        text = "".join(self._aliases[part] if isinstance(part, int) else part for part in parts)
        return [self._ids.get(i, i) for i in self._model.encode(text, add_special_tokens=False).ids]


def chat_encoder(tokenizer: Tokenizer) -> _SentencePieceEncoder | _JsonEncoder:
    """The encoder for the chat prompts of a loaded tokenizer. control_tokens: their ids by their text.

    encode(parts, spaced) gives the ids of the parts, with no BOS but theirs; spaced: whether every text begins with
    sentencepiece's leading space, None as the checkpoint says. Raises RequestError for what the tokenizer cannot spell.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _SentencePieceEncoder(tokenizer)
    assert isinstance(tokenizer, JsonTokenizer), type(tokenizer)
    return _JsonEncoder(tokenizer)


def _without_markers(model: Any) -> tuple[bytes, list[str]]:
    """A sentencepiece model whose user-defined pieces that look like markers are control pieces; and those pieces."""
    looks = [piece for piece in model.id_to_piece(list(range(model.get_piece_size()))) if _MARKER.fullmatch(piece)]
    # As protobuf writes a piece: its text (field 1: size, bytes), perhaps a score (2: a float), its type (3: 4 is
    # user-defined, 3 control).
    texts = {_size(piece.encode()) + piece.encode(): piece for piece in looks}
    one_of_them = b"|".join(map(re.escape, texts)) or rb"(?!)"
    user_defined = re.compile(rb"(\x0a(%s)(?:\x15.{4})?\x18)\x04" % one_of_them, re.DOTALL)
    data = model.serialized_model_proto()
    return user_defined.sub(b"\\1\x03", data), [texts[match[2]] for match in user_defined.finditer(data)]


def _size(text: bytes) -> bytes:
    return bytes([len(text)] if len(text) < 128 else [len(text) & 127 | 128, len(text) >> 7])
