"""Text to token ids and back: sentencepiece (`tokenizer.model`) in the core, `tokenizer.json` with the extra `hf`.

A tokenizer of either kind has
    vocab_size
    bos_id           None where the model begins without one
    eos_ids
    encode(text)     token ids, BOS first where the model wants one
    decode(ids)      the text, control tokens left out

Text that looks like a control token ("</s>", "<|im_end|>") is encoded as text: only the engine makes control tokens.
`encode` raises RequestError for lone surrogates and for characters that the vocabulary would drop: what a model reads
is what was asked, and a warning would not reach the caller of a server. Where the vocabulary has a token for the
unknown, as the model was trained with, that is used and a warning is logged once.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import RequestError, TokenizerError
from models.errors import ModelFormatError, require, shown
from models.files import optional_object, read_bytes

log = logging.getLogger("isotherm")

MAX_BYTES = 256 << 20  # of a tokenizer's file; the largest known has some 35 MB

INCOMPLETE = "\ufffd"  # what decoders write for bytes that are no character (yet)
APART = "\ue000"  # of the private use area: spelled in bytes, which are merged with nothing
# Llama 3's own tokenizer.model: lines of a base64 token and its rank.
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")


class AddedToken(NamedTuple):
    """A token that a fine-tuned model has beside its trained vocabulary; a special one is no text."""

    id: int
    content: str
    special: bool


def load_tokenizer(path: Path, vocab_size: int | None = None) -> "Tokenizer":
    """The tokenizer of a model directory, or of a file; vocab_size: of the model, which has a row for every token and
    may have more. Raises TokenizerError naming what was looked for, or both numbers."""
    kinds: dict[str, Callable[..., Tokenizer]] = {".model": SentencePieceTokenizer, ".json": JsonTokenizer}
    directory = path if path.is_dir() else path.parent
    files = [path / f"tokenizer{suffix}" for suffix in kinds] if path.is_dir() else [path]
    try:
        settings = optional_object(directory / "tokenizer_config.json")
        for file in files:
            if file.is_file() and file.suffix in kinds:
                tokenizer = kinds[file.suffix](file, settings, _added_tokens(directory, settings))
                numbers = f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is {vocab_size}"
                fits = vocab_size is None or tokenizer.vocab_size <= vocab_size
                require(fits, f"{path}: {numbers}", error=TokenizerError)
                return tokenizer
    except ModelFormatError as error:
        raise TokenizerError(str(error)) from None
    raise TokenizerError(f"{path}: no tokenizer.model (sentencepiece) and no tokenizer.json found")


def _added_tokens(directory: Path, settings: dict[str, Any]) -> list[AddedToken]:
    """Those of tokenizer_config.json's added_tokens_decoder, or of the older added_tokens.json, by id."""
    file, decoder = directory / "tokenizer_config.json", settings.get("added_tokens_decoder")
    entries = list(decoder.items()) if isinstance(decoder, dict) else [("", decoder)]
    if decoder is None:
        file, listed = directory / "added_tokens.json", settings.get("additional_special_tokens")
        named = {*named_tokens(settings).values(), *map(token_text, listed if isinstance(listed, list) else [])}
        entries = [(repr(i), {"content": text, "special": text in named}) for text, i in optional_object(file).items()]
    tokens = []
    for i, entry in entries:
        token: dict[str, Any] = {"content": None, "special": False} | (entry if isinstance(entry, dict) else {})
        content, special = token["content"], token["special"]
        right = isinstance(content, str) and content and type(special) is bool and re.fullmatch("[0-9]{1,7}", i)
        wanted = "an added token needs an id and a content, and may be special, true or false; got"
        require(bool(right), f"{file}: {wanted}", {i: entry}, error=TokenizerError)
        tokens.append(AddedToken(int(i), content, special))
    return sorted(tokens, key=lambda token: token.id)


def token_text(token: Any) -> str | None:
    """Of a token as tokenizer_config.json has it: a text, or an object with a content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token and the like of a tokenizer_config.json."""
    texts = {name: token_text(token) for name, token in settings.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


class SentencePieceTokenizer:
    """A `tokenizer.model` of Llama 1 and 2 and their kin, with the tokens that a fine-tuned model added to it.

    Added tokens that are not special are found in text, as Transformers does; special ones never are.
    """

    def __init__(self, file: Path, settings: dict[str, Any], added: list[AddedToken]) -> None:
        from sentencepiece import SentencePieceProcessor

        data = read_bytes(file, MAX_BYTES)
        try:
            self._model = SentencePieceProcessor(model_proto=data)
            pieces: list[str] = self._model.id_to_piece(list(range(self._model.get_piece_size())))
            require(pieces != [], "it has no pieces", error=ValueError)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = "it is a tiktoken file, use tokenizer.json" if _TIKTOKEN.match(data) else error
            raise TokenizerError(f"{file}: not a sentencepiece model: {reason}") from None
        self._file = file
        self.vocab_size = max(len(pieces), added[-1].id + 1 if added else 0)
        bos, eos = self._model.bos_id(), self._model.eos_id()
        self.bos_id: int | None = bos if bos >= 0 and settings.get("add_bos_token", True) else None
        self.eos_ids: tuple[int, ...] = (eos,) if eos >= 0 else ()
        # Plain pieces are often listed too; their spaces are sentencepiece's.
        self.added_tokens = [t for t in added if t.special or pieces[t.id : t.id + 1] != [t.content]]
        self._split = splitter({token.content: token.id for token in self.added_tokens if not token.special})
        self._texts = pieces + [""] * (self.vocab_size - len(pieces))  # "" for special tokens too
        for token in self.added_tokens:
            self._texts[token.id] = "" if token.special else token.content
        self.spaced = bool(settings.get("legacy", True))  # whether text behind an added token begins with a space

    def encode(self, text: str) -> list[int]:
        check_text(text, "the text")
        ids = self.encode_parts(self._model, self._split(text), self.spaced)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def encode_parts(self, model: Any, parts: list[str | int], spaced: bool) -> list[int]:
        """Ids, and texts that the model encodes; spaced: whether all of these begin with its space, or only a first."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                before = "" if spaced or not ids else APART
                ids += model.encode(before + part)[len(model.encode(before)) :]
        if model.unk_id() in ids:
            _warn_unknown(self._file)
        return ids

    def decode(self, ids: list[int]) -> str:
        # Of pieces: what is none of the model's is text as it is, and a piece behind it keeps its space.
        return str(self._model.decode([text for i in ids if i < self.vocab_size and (text := self._texts[i])]))


def any_of(words: Iterable[str]) -> str:
    """A regular expression; of two words that begin alike the longer one is found."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)"


def splitter(words: dict[str, int]) -> Callable[[str], list[str | int]]:
    """What puts the ids of words into a text in their place."""
    border = re.compile(f"({any_of(words)})")
    return lambda text: [words[part] if i % 2 else part for i, part in enumerate(border.split(text))]


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
            vocabulary: dict[Any, int] = self._model.get_vocab(with_added_tokens=True)
            require(vocabulary != {}, f"{file}: not a tokenizer.json: it has no tokens", error=TokenizerError)
            self.vocab_size: int = max(vocabulary.values()) + 1
            named = named_tokens(settings)
            self.bos_id = self._bos_id(settings, vocabulary.get(named.get("bos_token")))
            eos = vocabulary.get(named.get("eos_token"))
            self.eos_ids: tuple[int, ...] = () if eos is None else (eos,)
            self._unknown = vocabulary.get(getattr(self._model.model, "unk_token", None))
            stages = (self._model.pre_tokenizer, self._model.normalizer)
            self._byte_level = any(b'"ByteLevel"' in stage.__getstate__() for stage in stages if stage is not None)
            byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            self._bytes_of = byte_level.pre_tokenize_str
            self._lost = set(byte_level.alphabet()) - vocabulary.keys()

    @contextlib.contextmanager
    def _library(self) -> Iterator[None]:
        """Whatever the library raises as a TokenizerError: plain Exception, and the panics of its Rust code, which are
        none and would end the process."""
        try:
            yield
        except (TokenizerError, RequestError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise TokenizerError(f"{self._file}: not a tokenizer.json: {error}") from None

    def _add(self, added: list[AddedToken]) -> None:
        """Tokens that the config has and the file lacks, or has as plain ones."""
        from tokenizers import AddedToken as Added

        known = self._model.get_added_tokens_decoder()
        for i, content, special in added:
            if self._model.token_to_id(content) is None or (special and i not in known):
                add = self._model.add_special_tokens if special else self._model.add_tokens
                add([Added(content, special=special, normalized=False)])
            if (found := self._model.token_to_id(content)) != i:
                raise TokenizerError(f"{self._file}: {shown(content)} has id {found} here and {i} in the config")

    def _bos_id(self, settings: dict[str, Any], bos: int | None) -> int | None:
        """The id that prompts begin with: as tokenizer_config.json says, else as tokenizer.json's own template does."""
        plain, full = (self._model.encode("a", add_special_tokens=special).ids for special in (False, True))
        template: int | None = full[0] if plain and full[1 : len(plain) + 1] == plain else None
        llama = settings.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast")
        if not settings.get("add_bos_token", llama or template is not None):
            return None
        return template if bos is None else bos

    def encode(self, text: str) -> list[int]:
        check_text(text, "the text")
        with self._library():
            encoding = self._model.encode(text, add_special_tokens=False)
            if lost := self._lost_letters(text, encoding):
                at = min(map(text.index, lost))
                letter = f"{text[at]!r} (U+{ord(text[at]):04X}, character {at} of the text)"
                raise RequestError(f"{self._file} cannot spell {letter} and would leave it out: remove or replace it")
        if self._unknown in encoding.ids:
            _warn_unknown(self._file)
        return encoding.ids if self.bos_id is None else [self.bos_id, *encoding.ids]

    def _lost_letters(self, text: str, encoding: Any) -> list[str]:
        """What the library drops without a word: its vocabulary has no token for it, and none for the unknown."""
        if self._byte_level:
            return [letter for letter in set(text) if self._lost and self._lost & set(self._bytes_of(letter)[0][0])]
        printed = (at for at, letter in enumerate(text) if not letter.isspace())
        if self._unknown is not None or {at for a, b in encoding.offsets for at in range(a, b)}.issuperset(printed):
            return []
        # Behind a character that was dropped the offsets are wrong; which one it was shows it alone.
        alone = {letter: self._model.encode(letter, add_special_tokens=False) for letter in set(text)}
        return [letter for letter, encoding in alone.items() if not (encoding.ids or letter.isspace())]

    def decode(self, ids: list[int]) -> str:
        with self._library():
            return str(self._model.decode(ids, skip_special_tokens=True))


@functools.cache
def _warn_unknown(file: Path) -> None:
    """Once."""
    log.warning("%s: the text has characters that it does not know; the model sees its token for the unknown", file)


def check_text(text: str, name: str) -> None:
    """Raises RequestError for what is no text: half of a surrogate pair."""
    if half := re.search("[\ud800-\udfff]", text):
        raise RequestError(f"{name} has a lone surrogate at character {half.start()}, as bytes give that are not UTF-8")


Tokenizer = SentencePieceTokenizer | JsonTokenizer


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
        # A control token, with nothing new, is dropped: as the only context it would cost the next piece its leading
        # space. Not so before any text, where it may be a space that the decoder leaves out and must still see.
        if len(whole) < len(text) or not text:
            self._window, self._shown = window, max(self._shown, len(whole))
        elif new:
            later = self._tokenizer.decode(window[self._clean :])
            if later.strip():
                window, whole = window[self._clean :], later
            self._window, self._clean, self._shown = window, len(window), len(whole)
        return new

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as replacement characters."""
        return self._tokenizer.decode(self._window)[self._shown :]
