"""Requests made to cost: patterns, schemas and templates that never end; nobody else pays."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from reference.live_server import Live, serving
from reference.safety_tools import ask, client_of, is_openai_error, wait_until
from reference.tiny import Tiny

pytestmark = pytest.mark.slow  # minutes; `make test-slow`

pytest.importorskip("llguidance")

# Takes the compiler longer than it has.
ENDLESS = "start: X\nX: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(30))


def endless(number: int) -> dict:
    """The same again; another text, so that nobody else's result is shared."""
    return {"structured_outputs": {"grammar": ENDLESS + "\n" * number}}


@pytest.fixture(scope="module")
def worked(tiny: Tiny) -> Iterator[Live]:
    with serving(tiny.folder) as running:
        ask(running, structured_outputs={"regex": "[a-z]+"})  # the compiler's processes are up
        yield running
        assert ask(running).status_code == 200
        running.check_idle()


def chain_of_refs(length: int) -> dict:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {}}}


def deep(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


EVIL_REGEXES = [
    "(a+)+$", "(((a+)+)+)+b", "a{1000}{1000}", "((a{100}){100}){100}", "[ab]*a[ab]{400}c",
    "(a|aa)+$",
    "(.*a){30}", "(?:a?){500}a{500}", "\\p{L}{1000}", "(" * 1500 + "a" + ")" * 1500, "(a", "a(?=b)",
    r"(a)\1", "a" * 5000, "", "\\", "[", "(?P<a>", "\0", "🙂{1,1000}", "^" * 1000, "|" * 4000,
]  # fmt: skip


@pytest.mark.parametrize("pattern", EVIL_REGEXES)
def test_a_pattern_ends_in_time_or_is_refused(worked: Live, pattern: str) -> None:
    began_s = time.monotonic()
    answer = ask(worked, structured_outputs={"regex": pattern}, max_tokens=4)
    assert answer.status_code in (200, 400), answer.text
    assert time.monotonic() - began_s < 40
    if answer.status_code == 400:
        assert is_openai_error(answer)


@pytest.mark.parametrize(
    "schema",
    [
        deep(60), deep(30), chain_of_refs(600), {"$ref": "#"}, {"$ref": "/etc/passwd"},
        {"type": "integer", "multipleOf": 99999989}, {"enum": [f"v{i}" for i in range(50_000)]},
        {"pattern": "a" * 5000}, {"type": "array", "minItems": 10**9},
        {"type": "string", "minLength": 10**9},
        {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}},
        {"type": "object", "patternProperties": {"(a+)+$": {}}}, {"not": {}}, {"type": "nothing"},
        {"allOf": [{"type": "string"}, {"type": "null"}]}, {"$defs": []}, {"x-guidance": 1},
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["response_format", "structured_outputs", "tools"])
def test_a_schema_ends_in_time_or_is_refused(worked: Live, schema: dict, way: str) -> None:
    """Every way in has the same limits (a backend was once forgotten elsewhere)."""
    if way == "response_format":
        fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    elif way == "structured_outputs":
        fields = {"structured_outputs": {"json": schema}}
    else:
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
        fields = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    began_s = time.monotonic()
    answer = ask(worked, max_tokens=4, **fields)
    assert answer.status_code in (200, 400), answer.text
    assert time.monotonic() - began_s < 40


def test_an_endless_grammar_is_refused_in_words(worked: Live) -> None:
    answer = ask(worked, **endless(0))
    assert answer.status_code == 400
    assert "takes more than" in answer.json()["error"]["message"]


def test_who_asks_for_the_endless_makes_nobody_else_wait(worked: Live) -> None:
    """Eight grammars of 5 s each; a plain request behind them needs no compiler at all."""
    with ThreadPoolExecutor(8) as pool:
        evil = [pool.submit(ask, worked, **endless(1 + number)) for number in range(8)]
        time.sleep(0.5)
        waits = []
        while len(waits) < 3:
            began_s = time.monotonic()
            assert ask(worked, max_tokens=4).status_code == 200
            waits.append(time.monotonic() - began_s)
        still = sum(not each.done() for each in evil)
        codes = {each.result().status_code for each in evil}
    assert codes <= {400, 503}
    assert max(waits) < 4, f"plain requests waited {waits} s behind others' grammars"
    assert still > 0, "nothing was tested: the endless were over before"


def test_time_before_the_queue_counts(worked: Live) -> None:
    """timeout_s is for the whole answer; waiting for a thread that prepares is part of it."""
    with ThreadPoolExecutor(8) as pool:
        evil = [pool.submit(ask, worked, **endless(20 + number)) for number in range(6)]
        time.sleep(0.5)
        began_s = time.monotonic()
        answer = ask(worked, max_tokens=4, timeout_s=1.0)
        took_s = time.monotonic() - began_s
        for each in evil:
            each.result()
    assert answer.status_code in (200, 504)
    assert took_s < 4, f"with timeout_s=1 the answer took {took_s:.1f} s"


def test_who_has_left_is_not_prepared_any_more(worked: Live) -> None:
    """Clients that leave at once must not keep the preparing threads busy for the others."""
    from reference.safety_tools import chat_body, post_bytes, wire

    for number in range(10):
        with wire(worked) as connection:
            body = chat_body(**endless(40 + number))
            connection.send(post_bytes("/v1/chat/completions", body, worked))
            time.sleep(0.1)
    began_s = time.monotonic()
    assert ask(worked, structured_outputs={"regex": "[0-9]+"}).status_code == 200
    assert time.monotonic() - began_s < 20, "the work of clients that have left went on"


def test_waiting_to_be_prepared_is_bounded(tiny: Tiny) -> None:
    """R1: the queue is bounded wherever a request waits, not only in front of the engine."""
    with serving(tiny.folder, server={"max_queued_requests": 2}, max_num_seqs=1) as live:
        ask(live, structured_outputs={"regex": "[a-z]+"})
        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(ask, live, **endless(60 + number)) for number in range(12)]
            codes = []
            for each in asked:
                codes.append(each.result().status_code)
        assert 503 in codes
        assert set(codes) <= {400, 503}
        live.check_idle()


# S8


LOOPS = {
    "nested": "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "filters": "{% for a in range(99999) %}{% set x = range(99999)|list|sum %}{% endfor %}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 999 }}{% endfor %}"
    "{% endfor %}",
    "deep": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
}


def with_template(tiny: Tiny, folder: Path, template: str) -> Path:
    shutil.copytree(tiny.folder, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": template}
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_never_ends_is_ended(tiny: Tiny, tmp_path: Path, name: str) -> None:
    folder = with_template(tiny, tmp_path / "model", LOOPS[name])
    with serving(folder, server={"template_timeout_s": 1.0}) as live:
        for _ in range(2):  # more than there are threads that prepare
            with ThreadPoolExecutor(3) as pool:
                answers = list(pool.map(lambda _: ask(live), range(3)))
            for answer in answers:
                assert answer.status_code == 400, answer.text
                assert "template" in answer.json()["error"]["message"]
        with client_of(live) as client:
            answer = client.post("/v1/completions", json={"prompt": "the quick", "max_tokens": 3})
            assert answer.status_code == 200
            answer = client.post("/v1/responses", json={"input": "a"})
            assert answer.status_code == 400
        live.check_idle()


def test_every_route_that_renders_has_the_time_limit(tiny: Tiny, tmp_path: Path) -> None:
    """/tokenize renders messages too. (Elsewhere a second route bypassed such a check.)"""
    # Long enough to see that nothing ends it; and it ends by itself, so that the test can.
    long = "{% for a in range(3000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}"
    folder = with_template(tiny, tmp_path / "model", long)
    with serving(folder, server={"template_timeout_s": 0.2}) as live, client_of(live) as client:
        messages = [{"role": "user", "content": "a"}]
        for path in ("/tokenize", "/v1/tokenize", "/v1/chat/completions"):
            answer = client.post(path, json={"messages": messages})
            assert answer.status_code == 400, path
            assert "template ran for more than" in answer.json()["error"]["message"]


SSTI = [
    "{{ 7*7 }}", "{% for a in range(10**9) %}{% endfor %}", "{{ config }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ self.__init__.__globals__ }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "${7*7}", "#{7*7}", "<%= 7*7 %>", "{% raw %}", "{# #}", "{{ raise_exception('x') }}",
    "{%- set x = 1 -%}", "{{ messages }}", "{{ lipsum() }}", "%s%n{0.__class__}",
]  # fmt: skip


@pytest.mark.parametrize("text", SSTI)
def test_what_a_message_says_is_text(worked: Live, text: str) -> None:
    """It is encoded as it stands: the same tokens as when it is sent as a plain prompt."""
    with client_of(worked) as client:
        for role in ("user", "system", "assistant"):
            rendered = client.post(
                "/tokenize", json={"messages": [{"role": role, "content": text}]}
            ).json()
            plain = client.post(
                "/tokenize", json={"prompt": f"<|start|>{role}\n{text}<|end|><|start|>assistant\n"}
            ).json()
            assert rendered["tokens"] == plain["tokens"]
        answer = client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": text, "name": text}], "max_tokens": 2},
        )
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ 7*7 }}"},
        {"chat_template": LOOPS["nested"]},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"self": 1}},
        {"chat_template_kwargs": {"range": 1}},
        {"chat_template_kwargs": {"raise_exception": 1}},
        {"chat_template_kwargs": {"bos_token": "x"}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"chat_template_kwargs": {"tools": []}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_template_never_comes_from_a_request(worked: Live, fields: dict, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "input": "a"} | fields
    with client_of(worked) as client:
        assert client.post(path, json=body).status_code == 400


@pytest.mark.parametrize(
    "name", ["__class__", "caller", "loop", "namespace", "a b", "{{x}}", "_", ""]
)
def test_names_of_template_variables_do_no_harm(worked: Live, name: str) -> None:
    answer = ask(worked, chat_template_kwargs={name: "{{ 7*7 }}"}, max_tokens=2)
    assert answer.status_code in (200, 400)


def test_a_template_cannot_reach_out_of_its_sandbox(tiny: Tiny, tmp_path: Path) -> None:
    """SGLang CVE-2026-5760: a model file's template ran code."""
    marker = tmp_path / "ran"
    for number, source in enumerate(
        [
            f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}",
            f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{# {marker} #}}",
            "{{ messages.append(1) }}",
            "{{ raise_exception.__globals__ }}",
            "{{ strftime_now.__globals__['__builtins__'] }}",
            "{{ joiner.__init__.__globals__ }}",
            "{{ ('%s' % messages).format.__self__.__class__ }}",
            "{{ '{0.__class__.__mro__}'.format(1) }}",
            "{% include '/etc/passwd' %}",
            "{% import 'os' as os %}",
            "{{ 'x' * 10**9 }}",
            "{{ 9 ** 9 ** 9 }}",
        ]
    ):
        folder = with_template(tiny, tmp_path / f"model{number}", source)
        from forerun.engine.setup import make_codec
        from forerun.errors import TemplateError
        from forerun.model.loader import open_model

        codec = make_codec(open_model(folder))
        try:
            text = codec.chat_template.render([{"role": "user", "content": "a"}])
        except TemplateError:
            continue
        assert "class" not in text, source
        assert "builtin" not in text, source
    assert not marker.exists()


def test_many_grammars_at_once_leave_no_thread_behind(worked: Live) -> None:
    before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(
                ask, worked, structured_outputs={"regex": f"[a-z]{{{n + 1}}}"}, max_tokens=3
            )
            for n in range(24)
        ]
        assert {each.result().status_code for each in asked} == {200}
    wait_until(lambda: threading.active_count() <= before + 2, what="threads end")
