"""From the messages of a conversation to the token ids of the prompt for its next answer.

A template is text with control tokens ("<|im_start|>", "</s>") and the messages' contents in it. What a user writes
must stay text whatever it spells, so a conversation is rendered three times, here with · for the mark:

    plain    user\\nWhat is <|im_end|>?<|im_end|>\\n       what Hugging Face renders
    marked   user\\n·What is <·|im_end|>?·<|im_end|>\\n    marks around contents, and in control tokens that they spell
    opaque   user\\n·<|im_end|>\\n                         marks alone

The control tokens found in the marked text are the template's. It is taken if without its marks it is the plain text,
and if its control tokens are those of the opaque text: so they depend on the roles of the messages and on nothing that
anybody wrote. Templates that copy and strip contents pass; of those that do more with them (count, cut, search), each
conversation gives what it gives elsewhere, or is refused.

The prompt then comes in parts, ids of control tokens and texts between them:

    [1, "user\\nWhat does <|im_end|> mean?", 2, "\\n", 1, "assistant\\n"]

Texts are encoded as Hugging Face encodes them between parsed control tokens, except that a text which spells a control
token stays a text. Two ways lead a text to a control token in the libraries, and both are closed here: added tokens
that the checkpoint does not call special, and user-defined pieces of sentencepiece. Of these, what looks like a marker
("<|im_start|>", "[INST]") counts as control token; the others (runs of spaces, added words) are text like all text.

Templates come from whoever made the checkpoint and are rendered in a process of their own, with limits: see
`engine.jinja_worker`. Those whose source is one of chat_templates.json, Llama 2's format and ChatML, are known to mean
no harm and are rendered in this one, which saves a tenth of a second a prompt.
"""

import itertools
import json
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from engine import jinja_worker
from engine.config import EngineConfig
from engine.errors import RequestError, require_request
from engine.tokenizer import SentencePieceTokenizer, Tokenizer, any_of, check_text, named_tokens, splitter
from models.errors import ConfigError, require_config
from models.files import optional_object, read_bytes
from models.resolve import resolve

# The sources of the formats that are rendered in this process, as checkpoints spell them; first the usual one.
BUILT_IN: dict[str, list[str]] = json.loads(Path(__file__).with_name("chat_templates.json").read_text("utf-8"))
Message = dict[str, str]
_Change = str | Callable[[re.Match[str]], str]  # as `re.sub` takes it

CHOSEN = "--chat-template"
MAX_TEMPLATE_BYTES = 1 << 20
# Noncharacters of Unicode: no text has them, and where one does, another serves.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# A token that it matches is one of control, whatever the checkpoint calls it.
_MARKER = re.compile(r"<.+>|\[.+\]|\{.+\}", re.DOTALL)
_CORE = re.compile(r"\S(?:.*\S)?", re.DOTALL)  # of a content, without the white space around it


def check_messages(messages: Any, last: tuple[str, ...] = ("user",)) -> None:
    """Raises RequestError unless it is a list of {"role", "content"}: at most one system message, first; then user and
    assistant in turn, from a user's to one of `last`."""
    listed = isinstance(messages, list) and messages != []
    require_request(listed, "messages must be a list of at least one, got", messages)
    turns = itertools.cycle(("user", "assistant"))
    for i, message in enumerate(messages):
        right = isinstance(message, dict) and message.keys() == {"role", "content"}
        got = [*message] if isinstance(message, dict) else message
        require_request(right, f"messages[{i}] must be a dict of role and content, got", got)
        role, content = message["role"], message["content"]
        wanted = "system" if i == 0 and role == "system" else next(turns)
        require_request(role == wanted, f"messages[{i}] must be of role {wanted!r}, got", role)
        require_request(isinstance(content, str), f"messages[{i}]: content must be a str, got {type(content).__name__}")
        check_text(content, f"messages[{i}]: content")
    require_request(role in last, f"the last message must be of role {' or '.join(map(repr, last))}, got", role)


class TemplateSource(NamedTuple):
    """Which template, before a tokenizer is there. name: llama2, chatml or jinja; text: its jinja source; variables:
    the texts of bos_token, eos_token and the like."""

    name: str
    origin: str
    text: str
    variables: dict[str, str]


def find_template(config: EngineConfig, choice: str | None = None) -> TemplateSource:
    """The template to use: the choice (llama2, chatml or a file), else the checkpoint's own.

    Raises RequestError for a choice that is none; ConfigError where the checkpoint has no template; ModelFormatError
    for damaged files.
    """
    place = Path(config.tokenizer) if config.tokenizer else resolve(config.model)
    directory = place if place.is_dir() else place.parent
    settings = optional_object(directory / "tokenizer_config.json")
    # A link of the user's own file may lead anywhere.
    file = directory / "chat_template.jinja" if choice is None else Path(os.path.realpath(os.path.expanduser(choice)))
    if choice in BUILT_IN:
        origin, text = CHOSEN, BUILT_IN[choice][0]
    elif file.is_file():
        try:
            origin, text = str(file), read_bytes(file, MAX_TEMPLATE_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: not UTF-8 text: byte {error.start}") from None
    else:
        require_request(choice is None, f"--chat-template must be {', '.join(BUILT_IN)} or a file, got", choice)
        own = settings.get("chat_template")
        if isinstance(own, list):  # of several the one called default
            own = {str(one.get("name")): one.get("template") for one in own if isinstance(one, dict)}.get("default")
        origin, text = f"{directory}/tokenizer_config.json (chat_template)", own if isinstance(own, str) else ""
    require_config(text != "", f"{directory}: no chat template; use --chat-template llama2, chatml or FILE")
    plain = text.removesuffix("\n")  # a last newline is none of the template, says jinja2
    name = next((name for name, sources in BUILT_IN.items() if plain in sources), "jinja")
    return TemplateSource(name, origin, text if name == "jinja" else plain, named_tokens(settings))


class ChatTemplate:
    """Encodes conversations for one tokenizer. end_ids: the control token that ends an answer, which counts as EOS."""

    def __init__(self, source: TemplateSource, tokenizer: Tokenizer) -> None:
        """Raises ConfigError where the template is broken, or needs tokens that the tokenizer does not have."""
        self._encoder = chat_encoder(tokenizer)
        self._bos_id = tokenizer.bos_id
        # A token of one character could not be told from text; none is known.
        tokens = {text: i for text, i in self._encoder.control_tokens.items() if len(text) > 1}
        names = {i: text for text, i in tokens.items()}
        special = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
        variables = {key: names[i] for key, i in special.items() if i in names} | source.variables
        self.source = source._replace(variables=variables)
        needed = [variables.get(key, key) for key in special] if source.name == "llama2" else []
        if source.name == "chatml" and source.origin == CHOSEN:  # a checkpoint's own may spell them in plain text
            needed = ["<|im_start|>", "<|im_end|>"]
        if missing := ", ".join(token for token in needed if token not in tokens):
            raise ConfigError(f"{source.origin}: the tokenizer lacks {missing} of the {source.name} template")
        self._split = splitter(tokens)
        self._control = re.compile(any_of(tokens))
        self._spelled = re.compile(f"(?=(?:{any_of(tokens)}))(.)", re.DOTALL)
        self.end_ids = self._end_ids()

    def encode(self, messages: list[Message]) -> list[int]:
        """The prompt for the next answer; one BOS at its beginning where the model wants one.

        Raises RequestError for messages that are not a conversation, for those that the template refuses, and where it
        treats contents in a way that leaves in doubt what is the template's and what is the user's.
        """
        check_messages(messages)
        marked, mark = self._marked(messages)
        parts = [part if isinstance(part, int) else part.replace(mark, "") for part in self._split(marked)]
        # Llama 2 was trained with the space before [INST], whatever a fine-tune's settings say.
        ids = self._encoder.encode(parts, spaced=True if self.source.name == "llama2" else None)
        text = itertools.dropwhile(lambda i: i == self._bos_id, ids)
        return ids if self._bos_id is None else [self._bos_id, *text]

    def _marked(self, messages: list[Message]) -> tuple[str, str]:
        """The marked text, once it is known to be right, and its mark."""
        everything = "".join([self.source.text, *(message["content"] for message in messages)])
        free = [mark for mark in _MARKS if mark not in everything]
        require_request(free != [], "the messages have all 32 noncharacters from U+FDD0 on: one must be free")
        mark = free[0]

        def broken(core: re.Match[str]) -> str:
            return mark + self._spelled.sub(rf"\1{mark}", core[0]) + mark

        # Templates of models that think cut the thoughts out of earlier answers, at tokens that the answers spell: only
        # there they may find them whole, and only if none is left.
        variants: list[tuple[_Change, _Change]] = [(mark, mark), (broken, broken), (broken, rf"{mark}\g<0>{mark}")]
        changed = [[_changed(message, *variant) for message in messages] for variant in variants]
        plain, opaque, *marked = self._render([messages, *changed])
        control = self._control.findall(opaque)
        for text in marked:
            if text.replace(mark, "") == plain and self._control.findall(text) == control:
                return text, mark
        doubt = "by what they say, so that its control tokens cannot be told from theirs; give another with"
        raise RequestError(f"{self.source.origin}: this chat template treats these messages {doubt} --chat-template")

    def _render(self, conversations: list[list[Message]]) -> list[str]:
        if self.source.text in BUILT_IN.get(self.source.name, ()):
            return jinja_worker.render_here(self.source.text, conversations, self.source.variables)
        return jinja_worker.render(self.source.text, conversations, self.source.variables, self.source.origin)

    def _end_ids(self) -> frozenset[int]:
        """The first control token between an answer and the message that follows it, if there is one."""
        user, assistant = _MARKS[:2]
        turns = (("user", user), ("assistant", assistant), ("user", user))
        try:
            (text,) = self._render([[{"role": role, "content": content} for role, content in turns]])
        except RequestError:  # a template that refuses this conversation; what real ones give is seen then
            return frozenset()
        behind = self._split(text.rpartition(assistant)[2].partition(user)[0])
        return frozenset([part for part in behind if isinstance(part, int)][:1])


def _changed(message: Message, asked: _Change, answered: _Change) -> Message:
    """With the inner part of its content changed: outer white space stays, for templates that strip, and so does an
    empty content, for those that test for it. answered: what an assistant's message becomes."""
    change = answered if message["role"] == "assistant" else asked
    return message | {"content": _CORE.sub(change, message["content"], count=1)}


class _PieceEncoder:
    """Encodes with a copy of the model in which markers are control pieces, which sentencepiece never finds in text."""

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._model = model = _without_markers(tokenizer._model)
        control = [i for i in range(model.get_piece_size()) if model.is_control(i) or model.is_unknown(i)]
        self.control_tokens: dict[str, int] = {model.id_to_piece(i): i for i in control}
        added = tokenizer.added_tokens
        self.control_tokens |= {t.content: t.id for t in added if t.special or _MARKER.fullmatch(t.content)}
        self._split = splitter({t.content: t.id for t in added if t.content not in self.control_tokens})

    def encode(self, parts: list[str | int], spaced: bool | None = None) -> list[int]:
        split = [piece for part in parts for piece in ([part] if isinstance(part, int) else self._split(part))]
        return self._tokenizer.encode_parts(self._model, split, self._tokenizer.spaced if spaced is None else spaced)


class _JsonEncoder:
    """Encodes the whole prompt at once, with an alias in place of each control token, so that the library itself deals
    with what surrounds a token (leading spaces, stripping). The aliases belong to a copy of the tokenizer that knows
    the control tokens by no other name; random numbers keep them out of any text."""

    def __init__(self, tokenizer: Any) -> None:
        import tokenizers

        self._tokenizer = tokenizer
        described = json.loads(tokenizer._model.to_str())
        added: list[dict[str, Any]] = described["added_tokens"]
        control = [token for token in added if token["special"] or _MARKER.fullmatch(token["content"])]
        self.control_tokens: dict[str, int] = {token["content"]: token["id"] for token in control}
        self._aliases = {i: f"\ufdd0{secrets.token_hex(16)}\ufdd1" for i in self.control_tokens.values()}
        for token in control:
            token |= {"content": self._aliases[token["id"]], "special": False}
        self._model = tokenizers.Tokenizer.from_str(json.dumps(described))
        self._ids = {self._model.token_to_id(token["content"]): token["id"] for token in added}

    def encode(self, parts: list[str | int], spaced: bool | None = None) -> list[int]:
        self._tokenizer.encode("".join(part for part in parts if isinstance(part, str)))  # refuses what it cannot spell
        text = "".join(self._aliases[part] if isinstance(part, int) else part for part in parts)
        return [self._ids.get(i, i) for i in self._model.encode(text, add_special_tokens=False).ids]


def chat_encoder(tokenizer: Tokenizer) -> _PieceEncoder | _JsonEncoder:
    """The encoder for the chat prompts of a loaded tokenizer. control_tokens: their ids by their text.

    encode(parts, spaced) gives the ids of the parts, with no BOS but theirs; spaced: whether every text begins with
    sentencepiece's leading space, None as the checkpoint says. Raises RequestError for what the tokenizer cannot spell.
    """
    return _PieceEncoder(tokenizer) if isinstance(tokenizer, SentencePieceTokenizer) else _JsonEncoder(tokenizer)


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
