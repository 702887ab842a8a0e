from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from forerun.errors import TemplateError
from forerun.text import ChatTemplate, require_template, template

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == "system" and tools %}
        {%- continue %}
    {%- endif %}
    {%- set ns.last = loop.index0 %}
    {%- if message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments | tojson(indent=2) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
{% generation %}
{{ message['content'] + eos_token }}
{% endgeneration %}
    {% endif %}
{% endfor %}
"""
CHAT = [
    {"role": "user", "content": "  Is 1 < 2 & 'ü' > \"x\"?\n"},
    {"role": "assistant", "content": "Ja, 你好."},
    {"role": "user", "content": "{{ messages }} {% raw %}"},
]
SYSTEM = [{"role": "system", "content": "Be brief. "}, *CHAT]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"ort": "Köln", "n": [1, 2]}}}
CALLED = [
    *SYSTEM,
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "<b>"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "gibt <ü>"}}]


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    text = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def render(source: str, messages: Any = None, **options: Any) -> str:
    messages = [{"role": "user", "content": "hi"}] if messages is None else messages
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **options)


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize(
    ("source", "messages", "options"),
    [
        (SMOLLM2, CHAT, {}),
        (SMOLLM2, SYSTEM, {}),
        (QWEN, CHAT, {}),
        (QWEN, SYSTEM, {"tools": TOOLS}),
        (QWEN, CALLED, {"tools": TOOLS}),
        (QWEN, CHAT, {"enable_thinking": False}),
        (LLAMA3, CHAT, {}),
        (LLAMA3, SYSTEM, {"date_string": "1 May 2025"}),
        (MISTRAL, CHAT, {}),
        (
            "{% if documents is defined and tools is none %}{{ messages|length }}{% endif %}",
            CHAT,
            {},
        ),
        ("{% generation %}{% set x = 1 %}{% endgeneration %}[{{ x }}]", CHAT, {}),
        (
            "{% for m in messages %}{% break %}{% endfor %}x\n\n  {% if true %}  y{% endif %}\n",
            CHAT,
            {},
        ),
    ],
)
def test_prompts_are_the_text_that_transformers_renders(
    source: str, messages: list[dict[str, Any]], options: dict[str, Any], prompted: bool
) -> None:
    ours = render(source, messages, add_generation_prompt=prompted, **options)
    theirs = reference(source, messages, add_generation_prompt=prompted, **options)
    assert ours == theirs


@pytest.mark.model
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("messages", [CHAT, SYSTEM])
def test_smollm2s_own_template(messages: list[dict[str, Any]], prompted: bool) -> None:
    home = Path(os.environ.get("FORERUN_HOME", Path.home() / ".cache" / "forerun"))
    config = home / "models" / "smollm2-135m" / "tokenizer_config.json"
    source = json.loads(config.read_text()).get("chat_template") if config.exists() else None
    if source is None:
        pytest.skip(f"needs {config} with a chat template; run `forerun pull smollm2-135m`")
    theirs = reference(source, messages, add_generation_prompt=prompted)
    assert render(source, messages, add_generation_prompt=prompted) == theirs


def test_a_token_that_the_model_lacks_prints_as_nothing() -> None:
    template = ChatTemplate("[{{ bos_token }}{{ eos_token }}]", bos_token=None, eos_token="</s>")
    assert template.render(CHAT) == "[</s>]"


def test_the_date_is_at_hand() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_the_model_without_template() -> None:
    for source in (None, ""):
        with pytest.raises(TemplateError, match="no chat template"):
            require_template(source, bos_token=None, eos_token=None)
    assert require_template("x", bos_token=None, eos_token=None).render(CHAT) == "x"


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x", "{% nope %}", "{{ 1|nope }}", "{% if x %}"]
)
def test_a_broken_template_says_where(source: str) -> None:
    with pytest.raises(TemplateError, match=r"broken: line 1: .*chat_template"):
        ChatTemplate(source, bos_token=None, eos_token=None)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Only user\nroles!') }}", "Only user roles!"),
        ("{{ messages[0].nope.deeper }}", "nope"),
        ("{{ messages[7].role }}", "no element 7"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 / 0 }}", "zero"),
        ("{{ {'a': 1} | tojson(indent='x') + none }}", ""),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'x' %}", ""),
        ("{% import 'os' as os %}", ""),
        ("{{ strftime_now(3) }}", ""),
    ],
)
def test_a_refusal_is_one_line_with_the_way_out(source: str, reason: str) -> None:
    with pytest.raises(TemplateError) as caught:
        render(source)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert reason in message
    assert "plain prompt" in message


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}{{ (''|attr('__class__')).x }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ joiner.__init__.__globals__['os'] }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ self.__init__.__globals__.x }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('{0.__class__.__base__}'|attr('format'))('') }}",
        "{{ namespace.__init__.__globals__.x }}",
        "{{ dict.mro()[1] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages.clear() }}",
        "{{ lipsum(n=10**3) }}",
    ],
)
def test_the_way_out_of_the_sandbox_is_shut(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(10**9)|list|length }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ [0] * 10**9 }}",
        "{{ 9 ** 9999999 }}",
        "{% for i in range(99999) %}{{ 'a' * 100 }}{% endfor %}",
    ],
)
def test_what_would_fill_the_memory_is_refused(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


def test_formatting_reaches_no_attribute_of_the_sandboxs_own() -> None:
    assert render("{{ 'a{x.__class__}'.format_map({'x': 1}) }}") == "a"


def test_the_output_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_RENDERED_CHARS", 10)
    message = {"role": "user", "content": "x" * 10}
    assert render("{{ messages[0].content }}", [message]) == "x" * 10
    with pytest.raises(TemplateError, match="more than 10 characters"):
        render("{{ messages[0].content }}.", [message])


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [{"role": "user", "content": "hi"}]
    render(MISTRAL, messages)
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ("hi", "must be a list, not str"),
        ({"role": "user"}, "must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], "has no role; known: assistant"),
        ([{"role": 3, "content": "x"}], "has no role"),
        ([{"role": "usr", "content": "x"}], "unknown role 'usr'; did you mean 'user'"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "content": 3}], "neither text nor a list of parts: int"),
        ([{"role": "user", "content": ["x"]}], "neither text nor a list of parts"),
    ],
)
def test_messages_that_no_template_could_take(messages: Any, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        render(SMOLLM2, messages)


def test_a_tool_call_needs_no_content_and_parts_reach_the_template() -> None:
    assert (
        render(
            "{{ messages[0].tool_calls[0].id }}",
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "x1"}]}],
        )
        == "x1"
    )
    parts = [{"type": "text", "text": "a"}]
    assert render("{{ messages[0].content[0].text }}", [{"role": "user", "content": parts}]) == "a"
    with pytest.raises(TemplateError, match="refused"):
        render(SMOLLM2, [{"role": "user", "content": parts}])


@pytest.mark.parametrize("name", ["self", "bos_token", "raise_exception", "range"])
def test_a_template_variable_that_is_ours_cannot_be_set(name: str) -> None:
    template = ChatTemplate("x", bos_token=None, eos_token=None)
    with pytest.raises(TemplateError, match=name):
        template.render(CHAT, **{name: "x"})
