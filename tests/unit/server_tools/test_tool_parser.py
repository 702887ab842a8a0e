"""What models write, and which calls and content come of it."""

from __future__ import annotations

import json
import re
import time

import pytest
from tool_reading import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, calls_of, parser, read, whole

from forerun.server.tools import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    ToolFormat,
    new_call_id,
    parse_text,
)

ARGUMENTS = '{"city": "Paris", "n": [1, {"x": "}"}]}'
HERMES_CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, HERMES_CALL),
        (HERMES, f'<tool_call>{{"name":"f","arguments":{ARGUMENTS}}}</tool_call>'),
        (HERMES, f'<tool_call>[{{"name": "f", "arguments": {ARGUMENTS}}}]</tool_call>'),
        (HERMES, f'<tool_call>\n{{"arguments": {ARGUMENTS}, "name": "f"}}\n</tool_call>'),
        (HERMES, f'<tool_call>{{"id": 1.5, "name": "f", "parameters": {ARGUMENTS}}}</tool_call>'),
        (HERMES, f'\n\n<tool_call>{{"name": "f", "arguments": {ARGUMENTS} , "k":-1}}'),
        (HERMES, f'<tool_call>{{"n\\u0061me": "\\u0066", "arguments": {ARGUMENTS}}}</tool_call>'),
        (LLAMA, f'{{"name": "f", "parameters": {ARGUMENTS}}}'),
        (LLAMA, f' \n{{"type": "function", "name": "f", "parameters": {ARGUMENTS}}}\n'),
        (LLAMA, f'<|python_tag|>{{"name": "f", "parameters": {ARGUMENTS}}}'),
        (MISTRAL, f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}]'),
        (MISTRAL, f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}, "id": "123456789"}}]'),
        (MISTRAL_ARGS, f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}"),
        (MISTRAL_ARGS, f"[TOOL_CALLS]f{ARGUMENTS}"),
        (MISTRAL_ARGS, f"[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS] {ARGUMENTS}"),
        (MISTRAL_ARGS, f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}]'),
    ],
)
def test_one_call(format: ToolFormat, text: str) -> None:
    parsed = whole(format, text)
    assert calls_of(parsed) == [("f", ARGUMENTS)]
    assert parsed.content is None
    assert parsed.complete


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (
            HERMES,
            '{0}{"name": "f", "arguments": {}}{1}\n{0}{"name": "get-all", "arguments": {}}{1}',
        ),
        (HERMES, '{0}[{"name": "f", "arguments": {}}, {"name": "get-all", "arguments": {}}]{1}'),
        (HERMES, '{0}{"name": "f", "arguments": {}}\n{0}{"name": "get-all", "arguments": {}}'),
        (LLAMA, '{"name": "f", "parameters": {}}; {"name": "get-all", "parameters": {}}'),
        (LLAMA, '{"name": "f", "parameters": {}}\n{"name": "get-all", "parameters": {}}'),
        (MISTRAL, '[TOOL_CALLS][{"name":"f","arguments":{}},\n{"name":"get-all","arguments":{}} ]'),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]get-all[ARGS]{}"),
    ],
)
def test_calls_in_a_row(format: ToolFormat, text: str) -> None:
    parsed = whole(format, text.replace("{0}", "<tool_call>").replace("{1}", "</tool_call>"))
    assert calls_of(parsed) == [("f", "{}"), ("get-all", "{}")]
    assert parsed.content is None
    assert parsed.complete
    assert len({call.call_id for call in parsed.calls}) == 2


def test_text_around_and_between_calls_is_content_to_the_letter() -> None:
    deltas, complete = read(HERMES, ["Let me see.\n", HERMES_CALL, "\nand ", HERMES_CALL, " ok \n"])
    assert deltas == [
        ContentDelta("Let me see.\n"),
        CallStarted(0, "id0", "f"),
        ArgumentsDelta(0, ARGUMENTS),
        ContentDelta("\nand "),
        CallStarted(1, "id1", "f"),
        ArgumentsDelta(1, ARGUMENTS),
        ContentDelta(" ok \n"),
    ]
    assert complete


def test_white_space_alone_is_content_only_without_calls() -> None:
    assert whole(HERMES, " \n").content == " \n"
    assert whole(HERMES, "").content == ""
    assert whole(HERMES, f" \n{HERMES_CALL}\n\n").content is None


@pytest.mark.parametrize(
    "text",
    [
        "if a < b and b <c or <to <tool <tool_cal <tool_calls> <<tool_call <",
        "</tool_call>",
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>no JSON</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "parameters": {}, "name": "f"}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "f", }</tool_call>',
        "<tool_call>{}</tool_call>",
        "<tool_call>[]</tool_call>",
        "<tool_call>[[",
        "<tool_call><tool_call>",
        "<tool_call>f[ARGS]{}</tool_call>",
        '{"name": "f", "arguments": {}}',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    parsed = whole(HERMES, f"see: {text}")
    assert parsed.content == f"see: {text}"
    assert parsed.calls == ()
    assert parsed.complete
    assert whole(HERMES, text).content == text


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (LLAMA, '{"city": "Paris"}'),
        (LLAMA, '{"name": "Bob", "parameters": {}}'),
        (LLAMA, 'So: {"name": "f", "parameters": {}}'),
        (LLAMA, '<|python_tag|>brave.call(query="x")'),
        (LLAMA, "{}"),
        (LLAMA, '{"type": "function"}'),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{}"),
        (MISTRAL, "[TOOL [TOOL_CALLS"),
        (MISTRAL_ARGS, "[TOOL_CALLS]unknown[ARGS]{}"),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARG]{}"),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[CALL_ID]a-b[ARGS]{}"),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS][ARGS]{}"),
        (MISTRAL_ARGS, "[TOOL_CALLS]f g[ARGS]{}"),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS][]"),
    ],
)
def test_what_is_no_call_in_other_formats(format: ToolFormat, text: str) -> None:
    parsed = whole(format, text)
    assert (parsed.content, parsed.calls, parsed.complete) == (text, (), True)


def test_a_call_after_a_failed_one() -> None:
    parsed = whole(HERMES, f"<tool_call>\n{HERMES_CALL}")
    assert parsed.content == "<tool_call>\n"
    assert calls_of(parsed) == [("f", ARGUMENTS)]
    parsed = whole(HERMES, f"<tool_call>oh</tool_call>{HERMES_CALL}")
    assert parsed.content == "<tool_call>oh</tool_call>"
    assert calls_of(parsed) == [("f", ARGUMENTS)]


def test_marks_within_strings_are_text() -> None:
    arguments = json.dumps(
        {"code": '</tool_call> "<tool_call>" \\" {[', "e": "🦊é"}, ensure_ascii=False
    )
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    deltas, complete = read(HERMES, text)  # in single characters
    assert deltas[1:] == [ArgumentsDelta(0, arguments)]
    assert complete


def test_emoji_in_pieces() -> None:
    # Half a character never arrives: the detokenizer withholds it. Joined ones come apart.
    family = "👩\u200d👩\u200d👧"
    arguments = f'{{"{family}": "🏳️\u200d🌈"}}'
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    text = f"{family}{call}{family}"
    deltas, _ = read(HERMES, text)
    assert [d.text for d in deltas if not isinstance(d, CallStarted)] == [
        family,
        arguments,
        family,
    ]


def test_deltas_come_as_soon_as_they_are_certain() -> None:
    reader = parser(HERMES)
    assert reader.push("Hi ") == [ContentDelta("Hi ")]
    assert reader.push("<") == []
    assert reader.push("b> <tool_") == [ContentDelta("<b> ")]
    assert reader.push('call>\n{"name": "f", "argu') == []
    assert reader.push('ments": ') == []
    assert reader.push('{"a') == [CallStarted(0, "id0", "f"), ArgumentsDelta(0, '{"a')]
    assert reader.push('": 1') == [ArgumentsDelta(0, '": 1')]
    assert reader.push("}}\n</tool_") == [ArgumentsDelta(0, "}")]
    assert reader.push("call>\n") == []
    assert reader.push("Done") == [ContentDelta("\nDone")]
    assert reader.finish(truncated=False) == []
    assert reader.complete
    assert reader.num_calls == 1


def test_other_json_is_not_held_back_in_llamas_format() -> None:
    reader = parser(LLAMA)
    assert reader.push('{"na') == []
    assert reader.push('tion": ') == [ContentDelta('{"nation": ')]
    assert reader.push('"F') == [ContentDelta('"F')]


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call> x', '{"a": 01}}', " x"),
        ('<tool_call>{"name": "f", "arguments": {"a": <b>}}</tool_call>', '{"a": <b>}}', None),
        ('<tool_call>{"name": "f", "arguments": {"a": "\n"}}', '{"a": "\n"}}', None),
        ('<tool_call>{"name": "f", "arguments": {"a": x</tool', '{"a": x</tool', None),
        ('<tool_call>{"name": "f", "arguments": {"a": {', '{"a": {', None),
        # The arguments are whole, the call is not.
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>', "{}", None),
        ('<tool_call>{"name": "f", "arguments": {} and</tool_call>', "{}", "and</tool_call>"),
        ('<tool_call>{"name": "f", "arguments": {}, "name": "f"}', "{}", '"f"}'),
        ('<tool_call>[{"name": "f", "arguments": {}]</tool_call>', "{}", None),
    ],
)
def test_announced_calls_that_go_wrong_stay_as_written(
    text: str, arguments: str, content: str | None
) -> None:
    parsed = whole(HERMES, text)
    assert calls_of(parsed) == [("f", arguments)]
    assert parsed.content == content
    assert not parsed.complete


def test_a_broken_call_ends_at_the_next_mark() -> None:
    text = "[TOOL_CALLS]f[ARGS]{[TOOL[TOOL_CALLS]f[ARGS]{}"
    parsed = whole(MISTRAL_ARGS, text)
    assert calls_of(parsed) == [("f", "{[TOOL"), ("f", "{}")]
    assert not parsed.complete


def test_a_list_that_goes_on_wrong_keeps_its_calls() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "unknown"}]'
    parsed = whole(MISTRAL, text)
    assert calls_of(parsed) == [("f", "{}")]
    assert parsed.content == ', {"name": "unknown"}]'
    parsed = whole(MISTRAL, text.replace(", {", " x {"))
    assert parsed.content == ' x {"name": "unknown"}]'


def test_surplus_after_a_whole_call_is_content() -> None:
    parsed = whole(HERMES, '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>')
    assert calls_of(parsed) == [("f", "{}")]
    assert parsed.content == "}\n</tool_call>"
    assert parsed.complete


@pytest.mark.parametrize(
    ("format", "text", "truncated", "complete"),
    [
        (HERMES, HERMES_CALL, True, True),
        (HERMES, HERMES_CALL.removesuffix("call>"), False, True),
        (HERMES, HERMES_CALL.removesuffix("call>"), True, False),
        (HERMES, HERMES_CALL.removesuffix("\n</tool_call>"), False, True),
        (HERMES, HERMES_CALL.removesuffix("}\n</tool_call>"), False, False),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}}', False, True),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}}', True, False),
        (LLAMA, '{"name": "f", "parameters": {}}', True, True),
        (LLAMA, '{"name": "f", "parameters": {}', True, False),
        (HERMES, f"{HERMES_CALL}\n<tool_call>", True, False),
    ],
)
def test_cut_texts(format: ToolFormat, text: str, truncated: bool, complete: bool) -> None:
    parsed = whole(format, text, truncated)
    assert parsed.complete is complete
    assert parsed.calls[0].name == "f"


def test_every_cut_of_a_call_is_content_or_a_call() -> None:
    text = f"a{HERMES_CALL}"
    for end in range(len(text)):
        parsed = whole(HERMES, text[:end], truncated=True)
        if parsed.calls:
            assert ARGUMENTS.startswith(parsed.calls[0].arguments)
            assert parsed.content == "a"
            assert not parsed.complete
        else:
            assert parsed.content == text[:end]


def test_ids() -> None:
    assert re.fullmatch(r"call_[0-9a-f]{24}", new_call_id())
    parsed = parse_text(HERMES_CALL, HERMES, {"f"})
    assert re.fullmatch(r"call_[0-9a-f]{24}", parsed.calls[0].call_id)


@pytest.mark.parametrize(
    "text",
    [
        "<" * 200_000,
        "<tool_call>" * 20_000,
        "<tool_call>" + "\n" * 200_000,
        "<tool_call>[" * 20_000,
        '<tool_call>{"name": "' + "f" * 200_000,
        '<tool_call>{"arguments": {"a": "' + "\\\\" * 100_000,
        HERMES_CALL * 2000 + "\n </tool_call" * 10_000,
        HERMES_CALL.removesuffix("</tool_call>") + " \n" * 100_000 + "</tool_cal" * 10_000,
        '<tool_call>{"name": "f", "arguments": {x' + "</tool_cal" * 20_000,
    ],
)
def test_time_is_linear(text: str) -> None:
    """Pushed in halves of a text and in whole: twice the text takes about twice the time."""
    text = text[:200_000]
    began = time.process_time()
    whole(HERMES, text)
    # 200,000 characters take some tenths of a second; a square would take hours.
    assert time.process_time() - began < 20
