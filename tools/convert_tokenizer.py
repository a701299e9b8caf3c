"""Tokenizer files for a converted model: tokenizer.json (byte-level BPE) or tokenizer.model (sentencepiece).

GGUF "gpt2"      tokens, types, merges                       -> tokenizer.json
GGUF "llama"     tokens, scores, types                       -> tokenizer.model
Meta, Llama 3    tiktoken: a base64 token and its rank a line -> tokenizer.json
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # sentencepiece's numbers, and llama.cpp's
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is parted before merging, by llama.cpp's name (tokenizer.ggml.pre). Others are refused: a near miss would
# give slightly wrong ids without a word.
PRE_TOKENIZERS = {"smollm": "smollm", "gpt-2": "gpt-2", "llama-bpe": "llama-bpe"}
PRE_TOKENIZERS |= {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


class VocabularyError(ValueError):
    """The parts of a tokenizer do not fit together; the message says which."""


def byte_level_bpe(
    vocab: Mapping[str, int], merges: Sequence[str], added: Mapping[int, bool], pre: str, bos: str | None
) -> dict[str, Any]:
    """tokenizer.json. vocab and merges are in GPT-2's alphabet for bytes; added: id -> whether it is a control token.

    pre: one of the values of `PRE_TOKENIZERS`. bos: the token that texts begin with.
    """
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise VocabularyError(f"merge {merge!r} is not of tokens of the vocabulary")
    llama3 = pre == "llama-bpe"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not llama3}
    first: dict[str, Any] | None = None
    if llama3:
        first = {"type": "Split", "pattern": {"Regex": _LLAMA3_SPLIT}, "behavior": "Isolated", "invert": False}
    elif pre == "smollm":
        first = {"type": "Digits", "individual_digits": True}
    names = {i: token for token, i in vocab.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    template: dict[str, Any] | None = None
    if bos is not None:

        def with_bos(text: str, number: int) -> list[dict[str, Any]]:
            return [{kind: {"id": i, "type_id": number}} for kind, i in (("SpecialToken", bos), ("Sequence", text))]

        template = {"type": "TemplateProcessing", "single": with_bos("A", 0)}
        template["pair"] = with_bos("A", 0) + with_bos("B", 1)
        template["special_tokens"] = {bos: {"id": bos, "ids": [vocab[bos]], "tokens": [bos]}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": names[i], **flags, "special": special} for i, special in sorted(added.items())
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [first, byte_level]} if first else byte_level,
        "post_processor": template,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": llama3,
            "vocab": dict(vocab),
            "merges": list(merges),
        },
    }


# Llama 3's tiktoken file.


def from_tiktoken(data: bytes, specials: Sequence[str]) -> tuple[dict[str, Any], int]:
    """(tokenizer.json, number of tokens) of Llama 3's tokenizer.model; `specials` follow its tokens, the first is BOS.

    tiktoken joins the neighbours whose join has the lowest rank; merges say the same in the other direction: every way
    to part a token in two others, in the order of the tokens' ranks.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines()):
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise VocabularyError(f"line {number + 1} is not a base64 token and its rank") from None
        if int(rank) != number or len(ranks) != number + 1:
            raise VocabularyError(f"line {number + 1} has rank {int(rank)}, or a token that came before")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise VocabularyError(f"byte {missing[0]} is not a token")
    alphabet = dict(enumerate(byte_alphabet()))
    vocab = {token.decode("latin-1").translate(alphabet): rank for token, rank in ranks.items()}
    merges = []
    for token in ranks:  # in the order of ranks
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        both = sorted((ranks[a], ranks[b], a, b) for a, b in splits if a in ranks and b in ranks)
        merges += [" ".join(part.decode("latin-1").translate(alphabet) for part in (a, b)) for _, _, a, b in both]
    vocab |= {special: len(ranks) + i for i, special in enumerate(specials)}
    added = {vocab[special]: True for special in specials}
    return byte_level_bpe(vocab, merges, added, "llama-bpe", specials[0]), len(vocab)


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: itself where it is printable Latin-1, else the next one from U+0100 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def llama3_specials(version: str) -> list[str]:
    """The 256 control tokens of Llama 3 ("3") or of 3.1 and later ("3.1"), in the order of their ids."""
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
    if version != "3":
        named |= {4: "finetune_right_pad_id", 8: "eom_id", 10: "python_tag"}
    reserved = (f"reserved_special_token_{i}" for i in range(256))
    return [f"<|{named[i] if i in named else next(reserved)}|>" for i in range(256)]


# sentencepiece's tokenizer.model: a protobuf message, of which these fields matter (sentencepiece_model.proto).
#   ModelProto      1 pieces {1 piece, 2 score, 3 type}, 2 trainer_spec, 3 normalizer_spec
#   TrainerSpec     3 model_type (2: BPE), 4 vocab_size, 35 byte_fallback, 40-43 ids, 45-48 pieces of unk, bos, eos, pad
#   NormalizerSpec  1 name, 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces


def sentencepiece_model(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    roles: Mapping[str, int],
    add_dummy_prefix: bool = True,
) -> bytes:
    """tokenizer.model with Llama's settings: BPE, nothing normalised. roles: ids of unk, bos, eos, pad, where known.

    Raises VocabularyError if sentencepiece does not take it.
    """
    from sentencepiece import SentencePieceProcessor

    # The space, as sentencepiece writes it; llama.cpp has it plain in tokens that are matched as they stand.
    names = [
        name.replace(" ", "\u2581") if kind == USER_DEFINED else name for name, kind in zip(pieces, types, strict=True)
    ]
    kinds = list(types)
    for role in ("bos", "eos"):
        if role in roles and kinds[roles[role]] in (NORMAL, USER_DEFINED, UNUSED):
            kinds[roles[role]] = CONTROL  # else sentencepiece says that there is none
    body = b"".join(
        _message(1, _text(1, name) + _float(2, score) + _number(3, kind))
        for name, score, kind in zip(names, scores, kinds, strict=True)
    )
    trainer = _number(3, 2) + _number(4, len(names)) + _number(35, int(BYTE in kinds))
    for i, role in enumerate(("unk", "bos", "eos", "pad")):
        trainer += _number(40 + i, roles.get(role, -1))
        if role in roles:
            trainer += _text(45 + i, names[roles[role]])
    normalizer = _text(1, "identity") + _number(3, int(add_dummy_prefix)) + _number(4, 0) + _number(5, 1)
    data = body + _message(2, trainer) + _message(3, normalizer)
    try:
        size = SentencePieceProcessor(model_proto=data).get_piece_size()
    except (RuntimeError, TypeError, ValueError) as error:
        raise VocabularyError(f"sentencepiece does not take the vocabulary: {error}") from None
    if size != len(names):
        raise VocabularyError(f"sentencepiece finds {size} pieces of {len(names)}")
    return data


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative number is written as its 64 bits
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode("utf-8"))
