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

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import jinja_worker
from engine.chat_tokens import chat_encoder
from engine.config import EngineConfig
from engine.errors import RequestError, shown
from engine.tokenizer import Tokenizer, any_of, optional_object, token_text
from models.errors import ConfigError
from models.files import read_bytes
from models.resolve import resolve

Message = dict[str, str]

BUILT_IN = ("llama2", "chatml")
CHOSEN = "--chat-template"
MAX_TEMPLATE_BYTES = 1 << 20
# Noncharacters of Unicode: no text has them, and where one does, another serves.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


def check_messages(messages: Any, last: tuple[str, ...] = ("user",)) -> None:
    """Raises RequestError unless it is a list of {"role", "content"}: at most one system message, first; then user and
    assistant in turn, from a user's to one of `last`."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a list of at least one message, got {shown(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            keys = f"the keys {', '.join(map(shown, message))}" if isinstance(message, dict) else shown(message)
            raise RequestError(f"messages[{i}] must be a dict of role and content, got {keys}")
        role, content = message["role"], message["content"]
        first_turn = messages[0]["role"] == "system"
        wanted = "user" if (i - first_turn) % 2 == 0 else "assistant"
        if role != wanted and not (i == 0 and role == "system"):
            raise RequestError(
                f"messages[{i}] must be of role {wanted!r}, got {shown(role)}: system only first, then user and "
                "assistant in turn"
            )
        if not isinstance(content, str):
            raise RequestError(f"messages[{i}]: content must be a str, got {type(content).__name__}")
        if surrogate := re.search("[\ud800-\udfff]", content):
            raise RequestError(
                f"messages[{i}]: content has a lone surrogate at character {surrogate.start()}, as bytes "
                "leave that are not UTF-8"
            )
    if messages[-1]["role"] not in last:
        wanted = " or ".join(map(repr, last))
        raise RequestError(f"the last message must be of role {wanted}, got {messages[-1]['role']!r}")


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Which template, before a tokenizer is there. name: llama2, chatml or jinja; text: its jinja source; variables:
    the texts of bos_token, eos_token and the like."""

    name: str
    origin: str
    text: str
    variables: dict[str, Any] = field(default_factory=dict)


def find_template(config: EngineConfig, choice: str | None = None) -> TemplateSource:
    """The template to use: the choice (llama2, chatml or a file), else the checkpoint's own.

    Raises RequestError for a choice that is none; ConfigError where the checkpoint has no template; ModelFormatError
    for damaged files.
    """
    place = Path(config.tokenizer) if config.tokenizer else resolve(config.model)
    directory = place if place.is_dir() else place.parent
    settings_file = directory / "tokenizer_config.json"
    settings = optional_object(settings_file)
    texts = {key: token_text(token) for key, token in settings.items() if key.endswith("_token")}
    variables = {key: text for key, text in texts.items() if text is not None}
    if choice in BUILT_IN:
        return TemplateSource(choice, CHOSEN, built_in()[choice][0], variables)
    own = directory / "chat_template.jinja"
    if choice is not None:
        own = Path(choice).expanduser().resolve()  # the user's own file: a link may lead anywhere
        if not own.is_file():
            raise RequestError(f"--chat-template must be {', '.join(BUILT_IN)} or a file, got {shown(choice)}")
    if own.is_file():
        origin = str(own)
        try:
            text = read_bytes(own, MAX_TEMPLATE_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{own}: not UTF-8 text: byte {error.start}") from None
    else:
        origin, text = f"{settings_file} (chat_template)", _own_template(settings)
    if not text:
        raise ConfigError(
            f"{directory}: the checkpoint has no chat template; give --chat-template llama2, chatml or FILE"
        )
    for name, sources in built_in().items():
        if (plain := text.removesuffix("\n")) in sources:  # a last newline is none of the template, says jinja2
            return TemplateSource(name, origin, plain, variables)
    return TemplateSource("jinja", origin, text, variables)


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
        tokens = self._encoder.control_tokens
        names = {i: text for text, i in tokens.items()}
        special = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
        defaults = {key: names[i] for key, i in special.items() if i in names}
        self.source = source = dataclasses.replace(source, variables=defaults | source.variables)
        needed = []
        if source.name == "llama2":
            needed = [source.variables.get(key, key) for key in ("bos_token", "eos_token")]
        elif source.name == "chatml" and source.origin == CHOSEN:  # a checkpoint's own may spell them in plain text
            needed = ["<|im_start|>", "<|im_end|>"]
        if missing := [token for token in needed if token not in tokens]:
            raise ConfigError(
                f"{source.origin}: the tokenizer lacks {', '.join(missing)} of the {source.name} template"
            )
        # A token of one character could not be told from text; none is known.
        control = any_of(token for token in tokens if len(token) > 1)
        self._control = re.compile(f"({control})")
        self._spelled = re.compile(f"(?=(?:{control}))(.)", re.DOTALL)
        self.end_ids = self._end_ids()

    def encode(self, messages: list[Message]) -> list[int]:
        """The prompt for the next answer; one BOS at its beginning where the model wants one.

        Raises RequestError for messages that are not a conversation, for those that the template refuses, and where it
        treats contents in a way that leaves in doubt what is the template's and what is the user's.
        """
        check_messages(messages)
        marked, mark = self._marked(messages)
        parts = [text.replace(mark, "") for text in self._control.split(marked)]
        ids = self._encoder.encode(
            [self._encoder.control_tokens[part] if i % 2 else part for i, part in enumerate(parts)],
            # Llama 2 was trained with the space before [INST], whatever a fine-tune's settings say.
            spaced=True if self.source.name == "llama2" else None,
        )
        begins = next((n for n, i in enumerate(ids) if i != self._bos_id), len(ids))
        return ids if self._bos_id is None else [self._bos_id, *ids[begins:]]

    def _marked(self, messages: list[Message]) -> tuple[str, str]:
        """The marked text, once it is known to be right, and its mark."""
        mark = self._mark(messages)
        opaque = self._with(messages, lambda core, role: mark)
        broken = self._with(messages, lambda core, role: mark + self._spelled.sub(rf"\1{mark}", core) + mark)
        # Templates of models that think cut the thoughts out of earlier answers, at tokens that the answers spell: only
        # there they may find them whole, and only if none is left.
        whole = self._with(
            messages,
            lambda core, role: mark + (core if role == "assistant" else self._spelled.sub(rf"\1{mark}", core)) + mark,
        )
        attempts = [broken] if whole == broken else [broken, whole]
        plain, reference, *marked = self._render([messages, opaque, *attempts])
        control = self._control.findall(reference)
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

    @staticmethod
    def _with(messages: list[Message], change: Callable[[str, str], str]) -> list[Message]:
        """The messages with the inner part of each content changed: outer white space stays, for templates that strip,
        and so does an empty content, for those that test for it."""
        changed = []
        for message in messages:
            role, content = message["role"], message["content"]
            core = content.strip()
            left = content[: len(content) - len(content.lstrip())]
            right = content[len(left) + len(core) :]
            changed.append({"role": role, "content": left + change(core, role) + right if core else content})
        return changed

    def _render(self, conversations: list[list[Message]]) -> list[str]:
        if self.source.text in built_in().get(self.source.name, ()):
            return jinja_worker.render_here(self.source.text, conversations, self.source.variables)
        return jinja_worker.render(self.source.text, conversations, self.source.variables, self.source.origin)

    def _end_ids(self) -> frozenset[int]:
        """The first control token between an answer and the message that follows it, if there is one."""
        user, assistant = _MARKS[:2]
        turns = [("user", user), ("assistant", assistant), ("user", user)]
        try:
            (text,) = self._render([[{"role": role, "content": content} for role, content in turns]])
        except RequestError:  # a template that refuses this conversation; what real ones give is seen then
            return frozenset()
        behind = text.rpartition(assistant)[2].partition(user)[0]
        match = self._control.search(behind)
        return frozenset() if match is None else frozenset([self._encoder.control_tokens[match[0]]])
