"""Chat templates: messages to the prompt text that a model was trained on, in a sandbox.

A template comes with the model's files and is never taken from a request. It runs as transformers
runs it, so that prompts are the same text; what it could do beyond that is refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import TemplateError, nearest_name

__all__ = ["ChatTemplate", "require_template"]

MAX_RENDERED_CHARS = 4_000_000
MAX_POWER_BITS = 1024
ROLES = ("assistant", "developer", "function", "ipython", "system", "tool", "user")
RESERVED = frozenset({"bos_token", "eos_token", "self"})  # render's own arguments are taken anyway


class ChatTemplate:
    """A compiled chat template.

    Raises:
        TemplateError: the source is not a template, here; on `render`, whatever it refuses.
    """

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        self.source = source
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        # A token that the model lacks stays undefined, which prints as nothing; None would print.
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        try:
            self._template = _environment().from_string(source)
        except Exception as error:
            raise TemplateError(
                f"the model's chat template is broken: {_one_line(error)}; correct chat_template "
                "in the model's folder, or send a plain prompt instead of messages"
            ) from error

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """Render messages to prompt text; `extra` are further variables that the template knows."""
        self.check_variables(extra)
        _check_messages(messages)
        variables = {
            "documents": None,  # defined, as transformers has it
            **extra,
            **self._tokens,
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._join(variables)
        except TemplateError:
            raise  # ours: the text is too long
        except Exception as error:
            raise TemplateError(
                f"the model's chat template refused the messages: {_one_line(error)}; change the "
                "messages to what the model takes, or send a plain prompt"
            ) from error

    def check_variables(self, names: Iterable[str]) -> None:
        """Raise `TemplateError` for a variable that only the template itself may have."""
        for name in names:
            if name in RESERVED or name in _environment().globals:
                raise TemplateError(f"the template variable {name!r} cannot be set; leave it out")

    def _join(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        num_chars = 0
        for part in self._template.generate(variables):
            num_chars += len(part)
            if num_chars > MAX_RENDERED_CHARS:
                raise TemplateError(
                    f"the chat template wrote more than {MAX_RENDERED_CHARS} characters; "
                    "send fewer or shorter messages"
                )
            parts.append(part)
        return "".join(parts)


def require_template(
    source: str | None, *, bos_token: str | None, eos_token: str | None
) -> ChatTemplate:
    """Compile a model's chat template, or say that it has none and what to do."""
    if not source:
        raise TemplateError(
            "the model has no chat template, so it cannot take messages; send a plain prompt, "
            "or use a model that was tuned for chat"
        )
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, and arithmetic that cannot fill the memory at one stroke."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, str | bytes | list | tuple) and isinstance(times, int):
                    _refuse_above(len(sized) * times, MAX_RENDERED_CHARS, "a repeated value")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _refuse_above(left.bit_length() * right, MAX_POWER_BITS, "the bits of a power")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks, for training, what the assistant said; here it is a mere scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration is a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@functools.cache
def _environment() -> jinja2.Environment:
    extensions = [_Generation, loopcontrols]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]  # writes as much nonsense as it is asked for
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which no model has seen in its training.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _refuse_above(size: int, limit: int, what: str) -> None:
    if size > limit:
        raise SecurityError(f"{what} would have {size} parts, the limit is {limit}")


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TemplateError(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise TemplateError("there are no messages; send at least one")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_message(where: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise TemplateError(f"{where} must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise TemplateError(f"{where} has no role; known: {', '.join(ROLES)}")
    if role not in ROLES:
        raise TemplateError(f"{where} has the unknown role {role!r}; {nearest_name(role, ROLES)}")
    if content is None and not message.get("tool_calls"):
        raise TemplateError(f"{where} has no content; an empty text is ''")
    is_parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
    if not (content is None or isinstance(content, str) or is_parts):
        what = type(content).__name__
        raise TemplateError(f"the content of {where} is neither text nor a list of parts: {what}")


def _one_line(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= 300 else f"{text[:300]}..."
    return text if line is None else f"line {line}: {text}"
