"""How models write tool calls: the known formats, and which of them a chat template speaks.

A format is data. Reading it is `parser`'s, forcing it `grammar`'s, teaching it to a model whose
template knows no tools `preamble`'s.

The decision for templates without tool support, or with one that is none of these: the server does
not refuse tools. It puts `preamble`'s text into the system message, hands the template no tools,
and reads the answer in the fallback format. So tools work with every model that takes messages.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

import jinja2

__all__ = [
    "FALLBACK",
    "FORMATS",
    "HERMES",
    "LLAMA",
    "MISTRAL",
    "MISTRAL_ARGS",
    "ToolFormat",
    "ToolSupport",
    "find_format",
    "tool_support",
]

NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_-")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls into a model's text.

    A block is `opens`, then one call or (where `lists`) a JSON list of calls, then `closes`. A
    call is a JSON object with `name` and `arguments_key`; where `named`, it is a name outside of
    JSON, the mark [ARGS] and the arguments.
    """

    name: str
    opens: str  # the mark before a block; its first character occurs in it once
    closes: str  # the mark after a block, or "": the block ends with its JSON
    arguments_key: str = "arguments"
    lists: bool = False  # the format's own blocks are lists; reading takes either
    named: bool = False
    bare: bool = False  # a call may also begin without mark, where no other text came before
    filler: str = string.whitespace  # what may lie between two blocks without being content
    id_chars: int | None = None  # ids that the template takes have so many characters

    # A template speaks this format if it has all of `signs` and none of `unless`.
    signs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for mark in (self.opens, self.closes):
            assert mark.count(mark[:1]) == 1 or not mark

    @property
    def marks(self) -> tuple[str, ...]:
        """What must stay visible in the text, though it may be special tokens."""
        arguments = (ARGS, CALL_ID) if self.named else ()
        return tuple(mark for mark in (self.opens, self.closes, *arguments) if mark)

    def speaks(self, template: str) -> bool:
        """Say whether a chat template writes its calls like this."""
        has_signs = all(sign in template for sign in self.signs)
        return has_signs and not any(sign in template for sign in self.unless)


ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"

# Qwen3-Coder and GLM write <tool_call> too, but XML inside it.
_XML = ("<function=", "<parameter=", "<arg_key>")

# <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>. Hermes, Qwen2.5, Qwen3, SmolLM3;
# also SmolLM2, which by its training writes one list of calls between the marks.
HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    signs=("<tool_call>", "</tool_call>", "name", "arguments"),
    unless=_XML,
)
# {"name": "f", "parameters": {...}} and nothing else, at times after <|python_tag|>. Llama 3.1
# and 3.2, whose templates take one call in a message.
LLAMA = ToolFormat(
    "llama",
    "<|python_tag|>",
    "",
    arguments_key="parameters",
    bare=True,
    filler=string.whitespace + ";",
    signs=("<|start_header_id|>", '"parameters": ', '{"name": '),
    unless=_XML,
)
# [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]. Mistral 7B v0.3, Nemo, Small 3.
MISTRAL = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    "",
    lists=True,
    id_chars=9,
    signs=("[TOOL_CALLS]",),
    unless=(ARGS,),
)
# [TOOL_CALLS]f[ARGS]{...}. Mistral Small 3.2, Magistral, Devstral, Ministral 3.
MISTRAL_ARGS = ToolFormat(
    "mistral_args", "[TOOL_CALLS]", "", named=True, id_chars=9, signs=("[TOOL_CALLS]", ARGS)
)

FORMATS = {each.name: each for each in (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS)}
FALLBACK = HERMES

# Under which names templates take tools, by precedence. SmolLM3's has its own.
VARIABLES = ("tools", "xml_tools")


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """How one model is told of tools and writes its calls."""

    format: ToolFormat
    variable: str | None  # the template's variable for tools; None: `preamble` tells the model
    writes_calls: bool  # whether the template writes out the calls of earlier messages
    system_role: bool  # whether the template takes a system message


def tool_support(chat_template: str | None) -> ToolSupport:
    """Find out from a template's source how its model does tools."""
    source = chat_template or ""
    found = find_format(chat_template)
    used = _variables(source) if found else frozenset()
    return ToolSupport(
        format=found or FALLBACK,
        variable=next((each for each in VARIABLES if each in used), None),
        writes_calls=found is not None and "tool_calls" in source,  # SmolLM3's does not
        system_role="system role not supported" not in source.lower(),
    )


def find_format(chat_template: str | None) -> ToolFormat | None:
    """Recognise a template's format; None if it takes no tools or writes them in no known way."""
    if not chat_template or not _variables(chat_template).intersection(VARIABLES):
        return None
    return next((each for each in FORMATS.values() if each.speaks(chat_template)), None)


def _variables(source: str) -> frozenset[str]:
    """List the names that a template's code uses, as far as they are not attributes."""
    names, previous = set(), ""
    try:
        # Only the words: whoever renders the template knows its further statements.
        for _, kind, value in jinja2.Environment().lex(source):
            if kind == "name" and previous != ".":
                names.add(value)
            if kind != "whitespace":
                previous = value
    except jinja2.TemplateSyntaxError:
        return frozenset()
    return frozenset(names)
