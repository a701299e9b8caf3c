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

from engine.tokenizer import JsonTokenizer, SentencePieceTokenizer, Tokenizer, splitter

_MARKER = re.compile(r"<.+>|\[.+\]|\{.+\}", re.DOTALL)


class _SentencePieceEncoder:
    """Encodes with a copy of the model in which markers are control pieces, which sentencepiece never finds in text."""

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._model = _without_markers(tokenizer._model)
        pieces = range(self._model.get_piece_size())
        control = [i for i in pieces if self._model.is_control(i) or self._model.is_unknown(i)]
        self.control_tokens: dict[str, int] = {self._model.id_to_piece(i): i for i in control}
        added = tokenizer.added_tokens
        self.control_tokens |= {t.content: t.id for t in added if t.special or _MARKER.fullmatch(t.content)}
        self._split = splitter({t.content: t.id for t in added if t.content not in self.control_tokens})

    def encode(self, parts: list[str | int], spaced: bool | None = None) -> list[int]:
        split = [piece for part in parts for piece in ([part] if isinstance(part, int) else self._split(part))]
        return self._tokenizer.encode_parts(self._model, split, self._tokenizer.spaced if spaced is None else spaced)


class _JsonEncoder:
    """Encodes the whole prompt at once, with an alias in place of each control token, so that the library itself deals
    with what surrounds a token (leading spaces, stripping). The aliases belong to a copy of the tokenizer that knows
    the control tokens by no other name; a random number keeps them out of any text."""

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        import tokenizers

        self._tokenizer = tokenizer
        secret = secrets.token_hex(16)
        described = json.loads(tokenizer._model.to_str())
        added: list[dict[str, Any]] = described["added_tokens"]
        control = [token for token in added if token["special"] or _MARKER.fullmatch(token["content"])]
        self.control_tokens: dict[str, int] = {token["content"]: token["id"] for token in control}
        self._aliases = {i: f"\ufdd0{secret}.{i}\ufdd1" for i in self.control_tokens.values()}
        for token in control:
            token |= {"content": self._aliases[token["id"]], "special": False}
        self._model = tokenizers.Tokenizer.from_str(json.dumps(described))
        self._ids = {self._model.token_to_id(token["content"]): token["id"] for token in added}

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
    return _JsonEncoder(tokenizer)


def _without_markers(model: Any) -> Any:
    """A sentencepiece model as it is, but that user-defined pieces which look like markers are control pieces."""
    from sentencepiece import SentencePieceProcessor

    looks = [piece for piece in model.id_to_piece(list(range(model.get_piece_size()))) if _MARKER.fullmatch(piece)]
    one_of_them = b"|".join(re.escape(piece.encode()) for piece in looks) or rb"(?!)"
    # As protobuf writes a piece: its text (field 1: size, bytes), perhaps a score (2: a float), its type (3: 4 is
    # user-defined, 3 control).
    user_defined = rb"(\x0a[\x80-\xff]*[\x00-\x7f](?:%s)(?:\x15.{4})?\x18)\x04" % one_of_them
    data, count = re.subn(user_defined, b"\\1\x03", model.serialized_model_proto(), flags=re.DOTALL)
    return SentencePieceProcessor(model_proto=data) if count else model
