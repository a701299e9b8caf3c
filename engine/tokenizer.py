"""Text to token ids and back: sentencepiece (`tokenizer.model`) in the core, `tokenizer.json` with the extra `hf`.

Text that looks like a control token ("</s>", "<|im_end|>") is encoded as text: only the engine makes control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from engine.errors import TokenizerError
from models.errors import ModelFormatError
from models.loader import read_object

INCOMPLETE = "\ufffd"  # what decoders write for bytes that are no character (yet)


# Llama 3's own tokenizer.model: lines of a base64 token and its rank.
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")


class Tokenizer(Protocol):
    """bos_id is None where the model begins without one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, BOS first where the model wants one. Raises TokenizerError for lone surrogates."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, control tokens left out."""
        ...


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory, or of a file. Raises TokenizerError naming what was looked for."""
    directory = path if path.is_dir() else path.parent
    settings: dict[str, Any] = {}
    if (directory / "tokenizer_config.json").is_file():
        try:
            settings = read_object(directory / "tokenizer_config.json")
        except ModelFormatError as error:
            raise TokenizerError(str(error)) from None
    kinds: dict[str, Callable[[Path, dict[str, Any]], Tokenizer]] = {
        ".model": SentencePieceTokenizer,
        ".json": JsonTokenizer,
    }
    for suffix, kind in kinds.items():
        file = path / f"tokenizer{suffix}" if path.is_dir() else path
        if file.is_file() and file.suffix == suffix:
            return kind(file, settings)
    raise TokenizerError(f"{path}: no tokenizer.model (sentencepiece) and no tokenizer.json found")


class SentencePieceTokenizer:
    """A `tokenizer.model` of Llama 1 and 2 and their kin."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        from sentencepiece import SentencePieceProcessor

        data = file.read_bytes()
        try:
            self._model = SentencePieceProcessor(model_proto=data)
        except (RuntimeError, TypeError, ValueError) as error:
            reason: object = error
            if _TIKTOKEN.match(data):
                reason = "it is a tiktoken file, use tokenizer.json"
            elif data.startswith(b"version https://git-lfs"):
                reason = "it is a Git LFS pointer, not the file itself: run `git lfs pull`"
            raise TokenizerError(f"{file}: not a sentencepiece model: {reason}") from None
        self.vocab_size: int = self._model.get_piece_size()
        if self.vocab_size < 1:
            raise TokenizerError(f"{file}: not a sentencepiece model: it has no pieces")
        bos, eos = self._model.bos_id(), self._model.eos_id()
        self.bos_id = bos if bos >= 0 and settings.get("add_bos_token", True) else None
        self.eos_ids = (eos,) if eos >= 0 else ()

    def encode(self, text: str) -> list[int]:
        prefix = [] if self.bos_id is None else [self.bos_id]
        ids: list[int] = self._model.encode(_checked(text)) if text else []
        return prefix + ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode([i for i in ids if i < self.vocab_size])
        return text


class JsonTokenizer:
    """A `tokenizer.json`, read by Hugging Face's `tokenizers`."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        try:
            from tokenizers import Tokenizer as Tokenizers
        except ImportError:
            raise TokenizerError(f"{file}: needs the package tokenizers: pip install 'isotherm[hf]'") from None
        try:
            self._model = Tokenizers.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{file}: not a tokenizer.json: {error}") from None
        self._model.encode_special_tokens = True
        self._model.no_truncation()
        self.vocab_size: int = self._model.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._bos_id(settings)
        eos = self._id(settings, "eos_token")
        self.eos_ids = () if eos is None else (eos,)

    def _id(self, settings: dict[str, Any], key: str) -> int | None:
        token = settings.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        found: int | None = self._model.token_to_id(token) if isinstance(token, str) else None
        return found

    def _bos_id(self, settings: dict[str, Any]) -> int | None:
        """The id that prompts begin with: as tokenizer_config.json says, else as tokenizer.json's own template does."""
        plain, full = (self._model.encode("a", add_special_tokens=special).ids for special in (False, True))
        template: int | None = full[0] if plain and full[1 : len(plain) + 1] == plain else None
        llama = settings.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast")
        if not settings.get("add_bos_token", llama or template is not None):
            return None
        bos = self._id(settings, "bos_token")
        return template if bos is None else bos

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(_checked(text), add_special_tokens=False).ids
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode(ids, skip_special_tokens=True)
        return text


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(f"the text has a lone surrogate at character {error.start}") from None
    return text


class Detokenizer:
    """The text of an answer as it grows, token by token, never with half a character.

        prompt ... | answer ids, decoded in full | decoded, perhaps incomplete |
                   ^ _context                    ^ _clean                      ^ end

    Each push decodes only the ids from `_context` on: the last ids that ended in a whole character and those after
    them. The former give the decoder its context (a first piece loses its leading space without it).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-8:])
        self._context = 0
        self._clean = len(self._ids)
        # Characters of the window's text that were returned already; of a prompt that ends in half a character, none.
        self._shown = len(tokenizer.decode(self._ids).rstrip(INCOMPLETE))

    def push(self, token_id: int) -> str:
        """The characters that this token completes; may be none."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids[self._context :])
        whole = text.rstrip(INCOMPLETE)
        new = whole[self._shown :]
        if len(whole) < len(text):
            self._shown = max(self._shown, len(whole))
            return new
        if not new:
            # A control token: as the only context it would cost the next piece its leading space. Dropped, except
            # before any text, where it may be a space that the decoder leaves out and must still see.
            if text:
                self._ids.pop()
            return new
        self._context, self._clean = self._clean, len(self._ids)
        self._shown = len(self._tokenizer.decode(self._ids[self._context :]))
        return new

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as replacement characters."""
        text = self._tokenizer.decode(self._ids[self._context :])
        new = text[self._shown :]
        self._shown = len(text)
        return new
