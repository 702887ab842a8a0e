"""Which format a chat template speaks, by templates written like the families' own."""

from __future__ import annotations

import pytest

from forerun.server.tools import FALLBACK, FORMATS, ToolSupport, find_format, tool_support

QWEN = """{%- if tools %}<tools>{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}</tools>
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{%- endif %}{%- for message in messages %}{%- for tool_call in message.tool_calls %}
{{ tool_call.arguments | tojson }}{%- endfor %}{%- endfor %}"""
SMOLLM2 = "{% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}"
SMOLLM3 = """{%- if xml_tools -%}{%- for tool in xml_tools[:] -%}{{ tool | string }}{%- endfor -%}
<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args>}\\n</tool_call>{%- endif -%}
{%- for message in messages -%}{% generation %}{{ message.content }}{% endgeneration %}
{%- endfor -%}"""
LLAMA = """{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{{- "<|start_header_id|>" }}{{- 'Respond in the format {"name": function name, "parameters": {}}' }}
{%- for message in messages %}{%- if 'tool_calls' in message %}
{{- '{"name": "' + message.tool_calls[0].function.name + '", ' }}{{- '"parameters": ' }}
{%- endif %}{%- endfor %}"""
MISTRAL = """{%- if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}{%- endif %}
{%- for message in messages %}{%- if message.tool_calls is defined %}{{- "[TOOL_CALLS] [" }}
{%- endif %}{%- endfor %}"""
MISTRAL_ARGS = MISTRAL.replace('"[TOOL_CALLS] ["', '"[TOOL_CALLS]" + name + "[ARGS]"')
QWEN_CODER = QWEN.replace('{"name"', "<function=example>")
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{{ message['content'] }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN, "hermes"),
        (SMOLLM3, "hermes"),
        (LLAMA, "llama"),
        (MISTRAL, "mistral"),
        (MISTRAL_ARGS, "mistral_args"),
        (QWEN_CODER, None),
        (SMOLLM2, None),
        (GEMMA, None),
        (None, None),
        ("", None),
        # The word alone is no variable.
        ("{# tools #}<tool_call>name arguments</tool_call> tools {{ message.tools }}", None),
        ("{{ 'tools' }}<tool_call>name arguments</tool_call>", None),
        ("{{ tools }}{{ ' <tool_call> name arguments</tool_call>", None),
    ],
)
def test_the_format_is_found_in_the_template(template: str | None, name: str | None) -> None:
    found = find_format(template)
    assert (found and found.name) == name


def test_support() -> None:
    assert tool_support(QWEN) == ToolSupport(FORMATS["hermes"], "tools", True, True)
    assert tool_support(SMOLLM3) == ToolSupport(FORMATS["hermes"], "xml_tools", False, True)
    assert tool_support(LLAMA).variable == "tools"
    for template in (SMOLLM2, QWEN_CODER, None):
        assert tool_support(template) == ToolSupport(FALLBACK, None, False, True)
    assert not tool_support(GEMMA).system_role


def test_marks_are_what_decoding_must_not_hide() -> None:
    assert FORMATS["hermes"].marks == ("<tool_call>", "</tool_call>")
    assert FORMATS["llama"].marks == ("<|python_tag|>",)
    assert FORMATS["mistral"].marks == ("[TOOL_CALLS]",)
    assert FORMATS["mistral_args"].marks == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def test_formats_are_registered_under_their_names() -> None:
    assert all(name == format.name for name, format in FORMATS.items())
