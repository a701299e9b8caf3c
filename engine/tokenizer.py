"""Text to token ids and back: sentencepiece (`tokenizer.model`) in the core, `tokenizer.json` with the extra `hf`.

Text that looks like a control token ("</s>", "<|im_end|>") is encoded as text: only the engine makes control tokens.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.errors import RequestError, TokenizerError, shown
from models.errors import ModelFormatError
from models.files import read_bytes, read_object

log = logging.getLogger("isotherm")

MAX_BYTES = 256 << 20  # of a tokenizer's file; the largest known has some 35 MB

INCOMPLETE = "\ufffd"  # what decoders write for bytes that are no character (yet)
APART = "\ue000"  # of the private use area: spelled in bytes, which are merged with nothing
# Llama 3's own tokenizer.model: lines of a base64 token and its rank.
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")


class Tokenizer(Protocol):
    """bos_id is None where the model begins without one."""

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, BOS first where the model wants one.

        Raises RequestError for lone surrogates and for characters that the vocabulary would drop: what a model reads
        is what was asked, and a warning would not reach the caller of a server. Where the vocabulary has a token for
        the unknown, as the model was trained with, that is used and a warning is logged once.
        """
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, control tokens left out."""
        ...


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that a fine-tuned model has beside its trained vocabulary; a special one is no text."""

    id: int
    content: str
    special: bool


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory, or of a file. Raises TokenizerError naming what was looked for."""
    kinds: dict[str, type[SentencePieceTokenizer | JsonTokenizer]]
    kinds = {".model": SentencePieceTokenizer, ".json": JsonTokenizer}
    directory, files = path.parent, [path]
    if path.is_dir():
        directory, files = path, [path / f"tokenizer{suffix}" for suffix in kinds]
    try:
        settings = optional_object(directory / "tokenizer_config.json")
        added = _added_tokens(directory, settings)
        for file in files:
            if file.is_file() and file.suffix in kinds:
                return kinds[file.suffix](file, settings, added)
    except ModelFormatError as error:
        raise TokenizerError(str(error)) from None
    raise TokenizerError(f"{path}: no tokenizer.model (sentencepiece) and no tokenizer.json found")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, source: Path) -> None:
    """That the model has a row for every token; it may have more. Raises TokenizerError with both numbers."""
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is {vocab_size}"
        )


def optional_object(file: Path) -> dict[str, Any]:
    """Of a JSON file that need not be there."""
    return read_object(file) if file.is_file() else {}


def _added_tokens(directory: Path, settings: dict[str, Any]) -> list[AddedToken]:
    """Those of tokenizer_config.json's added_tokens_decoder, or of the older added_tokens.json, by id."""
    decoder = settings.get("added_tokens_decoder")
    if decoder is not None:
        file = directory / "tokenizer_config.json"
        entries = list(decoder.items()) if isinstance(decoder, dict) else [("", decoder)]
    else:
        file = directory / "added_tokens.json"
        listed = settings.get("additional_special_tokens")
        named = [settings.get(f"{kind}_token") for kind in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]
        special = [token_text(token) for token in [*named, *(listed if isinstance(listed, list) else [])]]
        entries = [
            (str(i) if type(i) is int else "", {"content": text, "special": text in special})
            for text, i in optional_object(file).items()
        ]
    tokens = []
    for i, entry in entries:
        content, is_special = token_text(entry), isinstance(entry, dict) and entry.get("special", False)
        number = int(i) if i.isdecimal() and len(i) < 9 else -1
        if not (0 <= number < 1 << 24 and content and isinstance(entry, dict) and type(is_special) is bool):
            raise TokenizerError(
                f"{file}: an added token needs an id, a content and may be special, got {shown(content)}"
            )
        tokens.append(AddedToken(number, content, is_special))
    return sorted(tokens, key=lambda token: token.id)


def token_text(token: Any) -> str | None:
    """Of a token as tokenizer_config.json has it: a text, or an object with a content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


class SentencePieceTokenizer:
    """A `tokenizer.model` of Llama 1 and 2 and their kin, with the tokens that a fine-tuned model added to it.

    Added tokens that are not special are found in text, as Transformers does; special ones never are.
    """

    def __init__(self, file: Path, settings: dict[str, Any], added: list[AddedToken]) -> None:
        from sentencepiece import SentencePieceProcessor

        data = read_bytes(file, MAX_BYTES)
        try:
            self._model = SentencePieceProcessor(model_proto=data)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = "it is a tiktoken file, use tokenizer.json" if _TIKTOKEN.match(data) else error
            raise TokenizerError(f"{file}: not a sentencepiece model: {reason}") from None
        self._num_pieces: int = self._model.get_piece_size()
        if self._num_pieces < 1:
            raise TokenizerError(f"{file}: not a sentencepiece model: it has no pieces")
        try:
            self._model.id_to_piece(list(range(self._num_pieces)))
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{file}: damaged: a piece is not UTF-8: {error}") from None
        self._file = file
        self.added_tokens = added
        self.vocab_size: int = max(self._num_pieces, added[-1].id + 1 if added else 0)
        bos, eos = self._model.bos_id(), self._model.eos_id()
        self.bos_id: int | None = bos if bos >= 0 and settings.get("add_bos_token", True) else None
        self.eos_ids: tuple[int, ...] = (eos,) if eos >= 0 else ()
        # id -> text, "" for special tokens. Plain pieces are often listed too; their spaces are sentencepiece's.
        self._added = {token.id: "" if token.special else token.content for token in added if not self._is_piece(token)}
        self._split = splitter({content: i for i, content in self._added.items() if content})
        self._spaced = bool(settings.get("legacy", True))  # whether text behind an added token begins with a space

    def _is_piece(self, token: AddedToken) -> bool:
        known = token.id < self._num_pieces and self._model.id_to_piece(token.id) == token.content
        return known and not token.special

    def encode(self, text: str) -> list[int]:
        ids = encode_parts(self._model, self._split(_checked(text)), self._spaced)
        if self._model.unk_id() in ids:
            _warn_unknown(self._file)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids: list[int]) -> str:
        text = ""
        known = (i for i in ids if self._added.get(i, i < self._num_pieces))
        for content, group in itertools.groupby(known, self._added.get):
            run = list(group)
            if content:
                text += content * len(run)
            elif text:  # a text loses the space that its first piece begins with; here it stays
                before: list[int] = self._model.encode("a")
                text += self._model.decode(before + run)[len(self._model.decode(before)) :]
            else:
                text = self._model.decode(run)
        return text


def any_of(words: Iterable[str]) -> str:
    """A regular expression; of two words that begin alike the longer one is found."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)"


def splitter(words: dict[str, int]) -> Callable[[str], list[str | int]]:
    """What puts the ids of words into a text in their place."""
    border = re.compile(f"({any_of(words)})")
    return lambda text: [words[part] if i % 2 else part for i, part in enumerate(border.split(text))]


def encode_parts(model: Any, parts: list[str | int], spaced: bool) -> list[int]:
    """Ids, and texts encoded by sentencepiece; spaced: whether all of these begin with its space, or only a first."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        elif part and (spaced or not ids):
            ids += model.encode(part)
        elif part:  # behind a character that joins no other
            ids += model.encode(APART + part)[len(model.encode(APART)) :]
    return ids


class JsonTokenizer:
    """A `tokenizer.json`, read by Hugging Face's `tokenizers`."""

    def __init__(self, file: Path, settings: dict[str, Any], added: list[AddedToken]) -> None:
        try:
            import tokenizers
        except ImportError:
            raise TokenizerError(f"{file}: needs the package tokenizers: pip install 'isotherm[hf]'") from None
        self._file = file
        data = read_bytes(file, MAX_BYTES)
        with self._library():
            self._model = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
            self._model.encode_special_tokens = True
            self._model.no_truncation()
            self._model.no_padding()
            if getattr(self._model.model, "dropout", None) is not None:
                self._model.model.dropout = None  # of training: it makes other ids each time
            self._add(added)
            vocabulary: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
            if not vocabulary:
                raise TokenizerError(f"{file}: not a tokenizer.json: it has no tokens")
            self.vocab_size: int = max(vocabulary.values()) + 1
            self.bos_id = self._bos_id(settings)
            eos = self._id(settings, "eos_token")
            self.eos_ids: tuple[int, ...] = () if eos is None else (eos,)
            unknown = getattr(self._model.model, "unk_token", None)
            self._unknown = vocabulary.get(unknown) if isinstance(unknown, str) else None
            stages = (self._model.pre_tokenizer, self._model.normalizer)
            self._byte_level = any(b'"ByteLevel"' in stage.__getstate__() for stage in stages if stage is not None)
            self._lost = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
            self._byte_letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    @contextlib.contextmanager
    def _library(self) -> Iterator[None]:
        """Whatever the library raises as a TokenizerError: plain Exception, and the panics of its Rust code, which are
        none and would end the process."""
        try:
            yield
        except (TokenizerError, RequestError):
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(f"{self._file}: not a tokenizer.json: {error}") from None

    def _add(self, added: list[AddedToken]) -> None:
        """Tokens that the config has and the file lacks, or has as plain ones."""
        from tokenizers import AddedToken as Added

        known = self._model.get_added_tokens_decoder()
        for token in added:
            if self._model.token_to_id(token.content) is None or (token.special and token.id not in known):
                new = Added(token.content, special=token.special, normalized=False)
                (self._model.add_special_tokens if token.special else self._model.add_tokens)([new])
            found = self._model.token_to_id(token.content)
            if found != token.id:
                raise TokenizerError(
                    f"{self._file}: the added token {shown(token.content)} has id {found} here and {token.id} in the "
                    "config"
                )

    def _id(self, settings: dict[str, Any], key: str) -> int | None:
        text = token_text(settings.get(key))
        found: int | None = None if text is None else self._model.token_to_id(text)
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
        with self._library():
            encoding = self._model.encode(_checked(text), add_special_tokens=False)
            at = self._first_lost(text, encoding)
        ids: list[int] = encoding.ids
        if at is not None:
            raise RequestError(
                f"{self._file} cannot spell {text[at]!r} (U+{ord(text[at]):04X}, character {at} of the text) and would "
                "leave it out: remove or replace it"
            )
        if self._unknown in ids:
            _warn_unknown(self._file)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def _first_lost(self, text: str, encoding: Any) -> int | None:
        """Where the library drops a character without a word: its vocabulary has no token for it, and none for that."""
        if self._byte_level:
            bytes_of = self._byte_letters.pre_tokenize_str
            lost = (at for at, letter in enumerate(text) if self._lost & set(bytes_of(letter)[0][0]))
            return next(lost, None) if self._lost else None
        if self._unknown is not None:
            return None
        covered = {at for begin, end in encoding.offsets for at in range(begin, end)}
        if all(at in covered or letter.isspace() for at, letter in enumerate(text)):
            return None
        # Behind a character that was dropped the offsets are wrong; which one it was shows it alone.
        ids = (self._model.encode(letter, add_special_tokens=False).ids for letter in text)
        return next((at for at, alone in enumerate(ids) if not alone and not text[at].isspace()), None)

    def decode(self, ids: list[int]) -> str:
        with self._library():
            return str(self._model.decode(ids, skip_special_tokens=True))


@functools.cache
def _warn_unknown(file: Path) -> None:
    """Once."""
    log.warning("%s: the text has characters that it does not know; the model sees its token for the unknown", file)


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the text has a lone surrogate at character {error.start}") from None
    return text


class Detokenizer:
    """The text of an answer as it grows, token by token, never with half a character.

        prompt ... | answer ids, decoded in full | decoded, perhaps incomplete |
                   ^ 0                           ^ _clean                      ^ end

    Each push decodes the window only: the last ids that ended in a whole character and those after them. The former
    give the decoder its context: at the beginning of what it decodes it leaves spaces out, so the context must hold
    more than spaces. A push that fails changes nothing.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-8:])
        self._clean = len(self._window)
        # Characters of the window's text that were returned already; of a prompt that ends in half a character, none.
        self._shown = len(tokenizer.decode(self._window).rstrip(INCOMPLETE))

    def push(self, token_id: int) -> str:
        """The characters that this token completes; may be none."""
        window = [*self._window, token_id]
        text = self._tokenizer.decode(window)
        whole = text.rstrip(INCOMPLETE)
        new = whole[self._shown :]
        if len(whole) < len(text):
            self._window, self._shown = window, max(self._shown, len(whole))
        elif not new:
            # A control token: as the only context it would cost the next piece its leading space. Dropped, except
            # before any text, where it may be a space that the decoder leaves out and must still see.
            if not text:
                self._window = window
        else:
            later = self._tokenizer.decode(window[self._clean :])
            if later.strip():
                window, whole = window[self._clean :], later
            self._window, self._clean, self._shown = window, len(window), len(whole)
        return new

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as replacement characters."""
        text = self._tokenizer.decode(self._window)
        new = text[self._shown :]
        self._shown = len(text)
        return new
