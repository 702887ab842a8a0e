"""Whatever the constraint admits is whole calls of the tools, with arguments that they accept."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tool_reading import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS

from forerun.server.tools import (
    FORMATS,
    ToolChoice,
    ToolFormat,
    parse_text,
    tool_constraint,
    validate_tools,
)

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema_rs")

ALL_FORMATS = pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
REQUIRED = ToolChoice("required")
DEFINITIONS: list[tuple[str, dict[str, Any] | None]] = [
    ("get", None),
    (
        "get_all",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "unit": {"enum": ["°C", 'a"b</tool_call>', None]},
                "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
            },
            "required": ["unit"],
            "additionalProperties": False,
            "$defs": {"day": {"type": "integer", "minimum": -9, "maximum": 99}},
        },
    ),
    (
        "get-x",
        {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"x": {"type": "boolean"}},
                                              "required": ["x"], "additionalProperties": False}}},
    ),
    # A request cannot loosen its own schema's enforcement.
    ("lenient", {"properties": {"n": {"const": 1}}, "required": ["n"],
                 "additionalProperties": False, "x-guidance": {"whitespace_flexible": True}}),
]  # fmt: skip
TOOLS = validate_tools(
    [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in DEFINITIONS
    ]
)
SPECIALS = ["<eos>", "[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<|python_tag|>"]
PAIRS = ['{"', '": ', '"}', "}}", "get", '"name', "</", "\n{", "arguments"]


class ByteTokenizer:
    """A token for each byte, a few of several, and special tokens."""

    def __init__(self) -> None:
        plain = [bytes([value]) for value in range(256)] + [pair.encode() for pair in PAIRS]
        self.special_token_ids = list(range(len(plain), len(plain) + len(SPECIALS)))
        self.tokens = plain + [special.encode() for special in SPECIALS]
        self.eos_token_id = self.special_token_ids[0]
        self.bos_token_id = None
        self.specials = dict(zip(SPECIALS, self.special_token_ids, strict=True))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(self.tokens[token] for token in tokens).decode()


BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def byte_level() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(BYTES))


def allowed(matcher: Any) -> list[int]:
    mask = matcher.compute_bitmask()
    return [8 * place + bit for place, byte in enumerate(mask) if byte
            for bit in range(8) if byte >> bit & 1]  # fmt: skip


def walk(tokenizer: Any, grammar: str, eos: int, generator: random.Random) -> list[int]:
    """Draw tokens among those allowed until the end, which is taken soon where it is offered."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    tokens: list[int] = []
    while len(tokens) < 600:
        choices = allowed(matcher)
        assert choices, matcher.get_error()
        token = generator.choice(choices)
        if eos in choices and generator.random() < 0.5:
            token = eos
        if token == eos:
            return tokens
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    raise AssertionError("the walk does not end")


def check_calls(text: str, format: ToolFormat, names: Sequence[str], most: int) -> int:
    parsed = parse_text(text, format, names)
    assert parsed.content is None, text
    assert parsed.complete, text
    assert 1 <= len(parsed.calls) <= most
    schemas = dict(DEFINITIONS)
    for call in parsed.calls:
        assert call.name in names
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        schema = schemas[call.name]
        if schema is None:
            assert arguments == {}
        else:
            jsonschema.validate(schema, arguments)
    return len(parsed.calls)


def grammar(
    format: ToolFormat, choice: ToolChoice, parallel: bool, specials: dict[str, int] | None = None
) -> str:
    constraint = tool_constraint(format, TOOLS, choice, parallel, specials)
    assert constraint is not None
    assert constraint.kind == "grammar"
    return constraint.source


@ALL_FORMATS
@pytest.mark.parametrize("specials", [None, BYTES.specials], ids=["text", "special"])
def test_walks_end_in_valid_calls(
    byte_level: Any, format: ToolFormat, specials: dict[str, int] | None
) -> None:
    source = grammar(format, REQUIRED, True, specials)
    assert not llguidance.LLMatcher.validate_grammar(source, byte_level)
    generator = random.Random(f"{format.name}{specials is None}")
    counts, seen = set(), set()
    for _ in range(40):
        tokens = walk(byte_level, source, BYTES.eos_token_id, generator)
        text = BYTES.text(tokens)
        counts.add(check_calls(text, format, [tool.name for tool in TOOLS], most=99))
        seen.update(tool.name for tool in TOOLS if f"{tool.name}" in text)
        if specials and not format.bare:
            assert BYTES.specials[format.opens] in tokens
    assert len(seen) == len(TOOLS)
    assert (len(counts) > 1) is not format.bare  # Llama's template takes one call in a message


@ALL_FORMATS
@pytest.mark.parametrize(
    ("choice", "parallel"), [(REQUIRED, False), (ToolChoice("named", "get"), True)]
)
def test_exactly_one_call(
    byte_level: Any, format: ToolFormat, choice: ToolChoice, parallel: bool
) -> None:
    source = grammar(format, choice, parallel)
    names = [choice.name] if choice.name else [tool.name for tool in TOOLS]
    generator = random.Random(f"{format.name}{choice.mode}")
    for _ in range(15):
        tokens = walk(byte_level, source, BYTES.eos_token_id, generator)
        assert check_calls(BYTES.text(tokens), format, names, most=1) == 1


def admits(tokenizer: Any, source: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
    return all(matcher.consume_token(token) for token in BYTES(text)) and matcher.is_accepting()


UNIT = '{"unit": "°C", "days": [7]}'


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "get_all", "arguments": ' + UNIT + "}\n</tool_call>"),
        (LLAMA, '{"name": "get_all", "parameters": ' + UNIT + "}"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "get", "arguments": {}}]'),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "get", "arguments": {}}, {"name": "get", "arguments": {}}]',
        ),
        (MISTRAL_ARGS, "[TOOL_CALLS]get_all[ARGS]" + UNIT),
        (MISTRAL_ARGS, "[TOOL_CALLS]get[ARGS]{}[TOOL_CALLS]get[ARGS]{}"),
    ],
)
def test_what_templates_write_is_admitted(byte_level: Any, format: ToolFormat, text: str) -> None:
    assert admits(byte_level, grammar(format, REQUIRED, True), text)
    for wrong in (
        *(text + "x", text[:-1], "x" + text, ""),
        text.replace("get", "got"),
        text.replace('"unit": "°C"', '"unit": "K"')
        .replace(": {}", ': {"a": 1}')
        .replace("]{}", ']{"a": 1}'),
    ):
        assert not admits(byte_level, grammar(format, REQUIRED, True), wrong)


def test_two_calls_only_in_parallel(byte_level: Any) -> None:
    call = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
    for parallel in (True, False):
        source = grammar(HERMES, REQUIRED, parallel)
        assert admits(byte_level, source, call)
        assert admits(byte_level, source, f"{call}\n{call}") is parallel


def test_no_constraint_where_nothing_is_forced() -> None:
    for choice in (ToolChoice("auto"), ToolChoice("none")):
        assert tool_constraint(HERMES, TOOLS, choice) is None


def test_most_tools_compile(byte_level: Any) -> None:
    definitions = [
        {"type": "function", "function": {"name": f"tool_{index}", "parameters": DEFINITIONS[1][1]}}
        for index in range(128)
    ]
    constraint = tool_constraint(HERMES, validate_tools(definitions), REQUIRED)
    assert constraint is not None
    assert not llguidance.LLMatcher.validate_grammar(constraint.source, byte_level)


def test_odd_schemas_are_quoted_safely(byte_level: Any) -> None:
    """Text in a schema cannot become grammar."""
    odd = 'x"\n} start: /.*/ # // %ignore <[0]> \\ \u2028 🦊'
    schema = {"description": odd, "properties": {odd: {"const": odd}}, "required": [odd],
              "additionalProperties": False}  # fmt: skip
    function = {"name": "f", "description": odd, "parameters": schema}
    tools = validate_tools([{"type": "function", "function": function}])
    constraint = tool_constraint(LLAMA, tools, REQUIRED)
    assert constraint is not None
    tokens = walk(byte_level, constraint.source, BYTES.eos_token_id, random.Random(1))
    arguments = parse_text(BYTES.text(tokens), LLAMA, ["f"]).calls[0].arguments
    assert json.loads(arguments) == {odd: odd}


@pytest.mark.model
@ALL_FORMATS
def test_walks_over_a_real_vocabulary(format: ToolFormat) -> None:
    path = Path.home() / ".cache/forerun/models/smollm2-135m/tokenizer.json"
    if not path.exists():
        pytest.skip("smollm2-135m is not pulled")
    eos = 2
    tokenizer = llguidance.LLTokenizer(path.read_text(), eos_token=eos)
    source = grammar(format, REQUIRED, True)
    generator = random.Random(format.name)
    for _ in range(10):
        tokens = walk(tokenizer, source, eos, generator)
        text = tokenizer.decode_bytes(tokens).decode()
        check_calls(text, format, [tool.name for tool in TOOLS], most=99)
