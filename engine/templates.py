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

Templates come from whoever made the checkpoint and are rendered in a process of their own, with limits: see
`engine.jinja_worker`. Those whose source is one of chat_templates.json, Llama 2's format and ChatML, are known to mean
no harm and are rendered in this one, which saves a tenth of a second a prompt.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from engine import jinja_worker
from engine.chat_tokens import chat_encoder
from engine.config import EngineConfig
from engine.errors import RequestError, shown
from engine.tokenizer import Tokenizer, any_of, check_text, named_tokens, optional_object, splitter
from models.errors import ConfigError
from models.files import read_bytes
from models.resolve import resolve

Message = dict[str, str]
_Change = str | Callable[[re.Match[str]], str]  # as `re.sub` takes it

CHOSEN = "--chat-template"
MAX_TEMPLATE_BYTES = 1 << 20
# Noncharacters of Unicode: no text has them, and where one does, another serves.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_CORE = re.compile(r"\S(?:.*\S)?", re.DOTALL)  # of a content, without the white space around it


def check_messages(messages: Any, last: tuple[str, ...] = ("user",)) -> None:
    """Raises RequestError unless it is a list of {"role", "content"}: at most one system message, first; then user and
    assistant in turn, from a user's to one of `last`."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a list of at least one message, got {shown(messages)}")
    turns = itertools.cycle(("user", "assistant"))
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            got = shown([*message] if isinstance(message, dict) else message)
            raise RequestError(f"messages[{i}] must be a dict of role and content, got {got}")
        role, content = message["role"], message["content"]
        wanted = "system" if i == 0 and role == "system" else next(turns)
        if role != wanted:
            order = "system only first, then user and assistant in turn"
            raise RequestError(f"messages[{i}] must be of role {wanted!r}, got {shown(role)}: {order}")
        if not isinstance(content, str):
            raise RequestError(f"messages[{i}]: content must be a str, got {type(content).__name__}")
        check_text(content, f"messages[{i}]: content")
    if messages[-1]["role"] not in last:
        wanted = " or ".join(map(repr, last))
        raise RequestError(f"the last message must be of role {wanted}, got {messages[-1]['role']!r}")


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
    settings_file = directory / "tokenizer_config.json"
    settings = optional_object(settings_file)
    # A link of the user's own file may lead anywhere.
    file = directory / "chat_template.jinja" if choice is None else Path(os.path.realpath(os.path.expanduser(choice)))
    if choice in built_in():
        origin, text = CHOSEN, built_in()[choice][0]
    elif file.is_file():
        try:
            origin, text = str(file), read_bytes(file, MAX_TEMPLATE_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: not UTF-8 text: byte {error.start}") from None
    elif choice is not None:
        raise RequestError(f"--chat-template must be {', '.join(built_in())} or a file, got {shown(choice)}")
    else:
        origin, text = f"{settings_file} (chat_template)", _own_template(settings)
    if not text:
        raise ConfigError(f"{directory}: no chat template; give --chat-template llama2, chatml or FILE")
    plain = text.removesuffix("\n")  # a last newline is none of the template, says jinja2
    name = next((name for name, sources in built_in().items() if plain in sources), "jinja")
    return TemplateSource(name, origin, text if name == "jinja" else plain, named_tokens(settings))


@functools.cache
def built_in() -> dict[str, list[str]]:
    """The sources of the formats that are rendered in this process, as checkpoints spell them; first the usual one."""
    return dict(json.loads(Path(__file__).with_name("chat_templates.json").read_text("utf-8")))


def _own_template(settings: dict[str, Any]) -> str:
    """tokenizer_config.json's; of several with names the one called default."""
    own = settings.get("chat_template")
    if isinstance(own, list):
        named = (entry for entry in own if isinstance(entry, dict) and entry.get("name") == "default")
        own = next(named, {}).get("template")
    return own if isinstance(own, str) else ""


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
        needed = []
        if source.name == "llama2":
            needed = [variables.get(key, key) for key in special]
        elif source.name == "chatml" and source.origin == CHOSEN:  # a checkpoint's own may spell them in plain text
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
        mark = self._mark(messages)

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
        raise RequestError(
            f"{self.source.origin}: this chat template treats these messages according to what they say, so that its "
            "control tokens cannot be told from theirs; give another with --chat-template"
        )

    def _mark(self, messages: list[Message]) -> str:
        everything = "".join([self.source.text, *(message["content"] for message in messages)])
        free = next((mark for mark in _MARKS if mark not in everything), None)
        if free is None:
            raise RequestError("the messages have all 32 noncharacters from U+FDD0 on: one must be free")
        return free

    def _render(self, conversations: list[list[Message]]) -> list[str]:
        if self.source.text in built_in().get(self.source.name, ()):
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
