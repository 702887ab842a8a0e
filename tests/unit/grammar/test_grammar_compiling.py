from __future__ import annotations

import gc
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from unit.grammar.conftest import allowed, make_compiler

from forerun.constraint import Constraint
from forerun.errors import DependencyMissing, ForerunError, InvalidConstraint, Overloaded
from forerun.grammar import GrammarCompiler, GrammarLimits
from forerun.text import TextCodec


def deep_schema(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + "{}" + "}}" * levels


def chain_of_refs(length: int) -> str:
    names = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    names[f"d{length}"] = {"type": "string"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": names})


def chain_of_rules(length: int, name: str) -> str:
    links = "\n".join(f'{name}{i}: {name}{i + 1} "a"' for i in range(length))
    return f'start: {name}0\n{links}\n{name}{length}: "a"'


REFUSED = {
    "deep": ("json", deep_schema(5000), "nested more deeply"),
    "deeper_and_bigger": ("json", deep_schema(10_000), "370002 bytes.*limit is 262144"),
    "deeper_than_allowed": ("json", deep_schema(40), "nested more deeply.*limit is 64"),
    "many_refs": ("json", chain_of_refs(600), "601|600 references"),
    "remote_ref": ("json", '{"$ref": "http://localhost:1/x"}', "nothing is fetched"),
    "file_ref": ("json", '{"properties": {"a": {"$ref": "/etc/passwd"}}}', "nothing is fetched"),
    "dangling_ref": ("json", '{"$ref": "#/$defs/none"}', "none"),
    "ref_to_itself": ("json", '{"$ref": "#"}', "nothing can be said"),
    "enormous_enum": ("json", json.dumps({"enum": [f"v{i}" for i in range(50_000)]}), "bytes"),
    "contradiction": ("json", '{"allOf": [{"type": "string"}, {"type": "null"}]}', "incompatible"),
    "false": ("json", "false", "no JSON satisfies"),
    "unknown_keyword": ("json", '{"not": {}}', "Unimplemented.*correct or simplify the schema"),
    "not_json": ("json", '{"a": ', "not valid JSON"),
    "nan": ("json", '{"const": NaN}', "NaN"),
    "inf": ("json", '{"const": 1e999}', "number"),
    "digits": ("json", '{"const": ' + "1" * 5000 + "}", "not valid JSON"),
    "list": ("json", "[]", "an object or true"),
    "half_pair": ("json", '{"const": "\ud800"}', "surrogate"),
    "escaped_half_pair": ("json", '{"const": "\\ud800"}', "hex escape"),
    "long_pattern": ("json", json.dumps({"pattern": "a" * 5000}), "5000 characters.*4096"),
    "too_big_multiple": ("json", '{"type": "integer", "multipleOf": 99999989}', "compile"),
    "long_regex": ("regex", "a" * 5000, "5000 characters"),
    "unbalanced": ("regex", "(a", "unclosed"),
    "nested_groups": ("regex", "(" * 1500 + "a" + ")" * 1500, "regex"),
    "look_ahead": ("regex", "a(?=b)", "look-around"),
    "back_reference": ("regex", r"(a)\1", "backreference"),
    "no_text": ("regex", r"[^\x00-\x{10ffff}]", "nothing can be said"),
    "regex_half_pair": ("regex", "\udfff", "surrogate"),
    "no_choice": ("choice", "[]", "no choice"),
    "choice_of_numbers": ("choice", "[1]", "a list of texts"),
    "many_choices": ("choice", json.dumps([str(i) for i in range(3000)]), "3000 choices"),
    "choice_half_pair": ("choice", '["a\\ud800"]', "U\\+D800"),
    "syntax": ("grammar", "start: (", "grammar"),
    "no_start": ("grammar", 'a: "b"', "start"),
    "null_byte": ("grammar", 'start: "\0"', "lexer error"),
    "empty": ("grammar", "", "start"),
    "import_a_file": ("grammar", "%import /etc/passwd\nstart: A", "cannot be used"),
    "intersection": ("grammar", "start: X\nX: /a/ & /b/", "nothing can be said"),
    "parentheses": ("grammar", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "deeply nested"),
    "chain_of_rules": ("grammar", chain_of_rules(6000, "r"), "too deeply"),
    "chain_of_terminals": ("grammar", chain_of_rules(6000, "T"), "too deeply"),
    "many_intersections": (
        "grammar",
        "start: X\nX: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(30)),
        "compile",
    ),
}
HARMLESS = {
    "nested_quantifiers": ("regex", "(a+)+$"),
    "more_of_them": ("regex", "(((a+)+)+)+b"),
    "counted": ("regex", "a{1000}{1000}"),
    "counted_groups": ("regex", "((a{100}){100}){100}"),
    "exponential_automaton": ("regex", "[ab]*a[ab]{400}c"),
    "null": ("regex", "\0a"),
    "recursive_ref": ("json", '{"type": "object", "properties": {"a": {"$ref": "#"}}}'),
    "anything": ("json", "true"),
    "two_to_the_60": (
        "json",
        json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}
                    for i in range(60)
                }
                | {"d60": {}},
            }
        ),
    ),
    "a_million_items": ("json", '{"type": "array", "items": {}, "maxItems": 1000000}'),
    "ambiguous": ("grammar", 'start: s\ns: s s | "a" | s s s'),
    "long_repetition": ("grammar", 'start: ("a" | "b" "c"){1,100000}'),
}


@pytest.fixture(scope="module")
def strict(byte_level: TextCodec):
    """Less time than by default: nothing here that compiles needs it."""
    compiler = make_compiler(
        byte_level, GrammarLimits(compile_s=3, memory_bytes=200 * 2**20, num_workers=1)
    )
    yield compiler
    compiler.close()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_in_one_line(strict, name: str) -> None:
    kind, source, reason = REFUSED[name]
    started = time.monotonic()
    with pytest.raises(InvalidConstraint, match=reason) as caught:
        strict.compile(Constraint(kind, source))
    assert time.monotonic() - started < 20
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert allowed(strict.compile(Constraint.choice(["still here"])).start())


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_dangerous_and_is_not(strict, name: str) -> None:
    kind, source = HARMLESS[name]
    (legal,) = allowed(strict.compile(Constraint(kind, source)).start())
    assert legal


@pytest.mark.parametrize(
    ("text", "legal"),
    [
        ('{"a": 1, "b": [1, 2]}', True),
        ('{"a":1,"b":[1,2]}', False),
        ('{\n  "a": 1\n}', False),
        ('{  "a": 1}', False),
        ('{"a" : 1}', False),
        (' {"a": 1}', False),
    ],
)
def test_json_has_one_space_after_commas_and_colons(
    compiler, byte_level: TextCodec, text: str, legal: bool
) -> None:
    state = compiler.compile(Constraint.json_object()).start()
    tokens = [*byte_level.encode_plain(text), byte_level.eos_id]
    assert (state.count_legal(tokens) == len(tokens)) is legal


def test_a_schema_may_set_its_own_whitespace(compiler, byte_level: TextCodec) -> None:
    schema = {"type": "array", "x-guidance": {"whitespace_flexible": True}}
    state = compiler.compile(Constraint.json_schema(schema)).start()
    tokens = byte_level.encode_plain("[1,\n  2]")
    assert state.count_legal(tokens) == len(tokens)


def test_a_grammars_own_options_do_not_change_what_is_legal(compiler, byte_level) -> None:
    own = '%llguidance {"no_forcing": false}\nstart: "the quick"'
    state = compiler.compile(Constraint("grammar", own)).start()
    assert state.count_legal(byte_level.encode_plain("t")) == 1


def test_references_in_data_are_data(compiler) -> None:
    schema = {"const": {"$ref": "http://a.b/c"}}
    assert compiler.compile(Constraint.json_schema(schema))
    schema = {"type": "object", "properties": {"$ref": {"type": "string"}}}
    assert compiler.compile(Constraint.json_schema(schema))


def test_a_constraint_is_compiled_once_and_states_are_apart(compiler, byte_level) -> None:
    constraint = Constraint("regex", "[0-9]{1,3}")
    with ThreadPoolExecutor(8) as pool:
        grammars = set(pool.map(lambda _: compiler.compile(constraint), range(32)))
    assert len(grammars) == 1
    grammar = grammars.pop()
    first, second = grammar.start(), grammar.start()
    first.advance(byte_level.encode_plain("12"))
    assert not second.may_end


def test_an_overrun_blocks_nobody_else_and_is_over_in_time(byte_level: TextCodec) -> None:
    # So much memory that on a fast machine too it is the time that runs out first.
    limits = GrammarLimits(compile_s=3, memory_bytes=8 * 1024**3, num_workers=2)
    compiler = make_compiler(byte_level, limits)
    slow = Constraint("grammar", REFUSED["many_intersections"][1])
    quick = Constraint("regex", "[a-z]+")
    with ThreadPoolExecutor(2) as pool:  # both processes take longer to start than to compile
        list(pool.map(compiler.compile, [Constraint("regex", "a"), Constraint("regex", "b")]))
    with ThreadPoolExecutor(1) as pool:
        overrun = pool.submit(compiler.compile, slow)
        time.sleep(0.2)
        compiler.compile(quick)
        assert not overrun.done()
        with pytest.raises(InvalidConstraint, match="more than 3 s"):
            overrun.result()
    compiler.close()


def test_when_all_workers_are_busy_others_are_told_to_come_back(byte_level: TextCodec) -> None:
    compiler = make_compiler(byte_level, GrammarLimits(compile_s=2, num_workers=1))
    compiler.compile(Constraint("regex", "warm"))
    evil = [
        Constraint("grammar", REFUSED["many_intersections"][1] + "\n" * count) for count in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        errors = [future.exception() for future in [pool.submit(compiler.compile, c) for c in evil]]
    assert {type(error) for error in errors} == {InvalidConstraint, Overloaded}
    assert compiler.compile(Constraint("regex", "again"))
    compiler.close()


def test_many_constraints_leave_memory_bounded(byte_level: TextCodec) -> None:
    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    compiler = make_compiler(byte_level, GrammarLimits(cache_bytes=4 * 2**20))

    def compile_some(first: int, count: int) -> float:
        for number in range(first, first + count):
            schema = {"type": "object", "properties": {f"p{number}": {"type": "string"}}}
            compiler.compile(Constraint.json_schema(schema)).start().masks([])
        gc.collect()
        return resident()

    early = compile_some(0, 200)
    late = compile_some(200, 400)
    assert 0 < compiler.num_kept < 200
    assert compiler.kept_bytes <= 4 * 2**20
    assert late - early < 8
    compiler.close()


def test_the_least_recently_used_goes_first(byte_level: TextCodec) -> None:
    compiler = make_compiler(byte_level, GrammarLimits(cache_bytes=2**20))
    kept = Constraint("regex", "kept")
    grammar = compiler.compile(kept)
    for number in range(40):
        compiler.compile(Constraint("regex", f"x{number}"))
        assert compiler.compile(kept) is grammar
    assert compiler.num_kept < 40
    compiler.close()


def test_closing_ends_the_processes(byte_level: TextCodec) -> None:
    compiler = make_compiler(byte_level)
    compiler.compile(Constraint("regex", "a"))
    trial = compiler._trials._places.queue[-1]
    assert trial.alive
    compiler.close()
    assert not trial.alive
    assert compiler.compile(Constraint("regex", "b"))
    compiler.close()


def test_without_the_library_the_error_says_what_to_install(
    byte_level: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(DependencyMissing, match=r"forerun\[structured\]"):
        GrammarCompiler(byte_level, 100, [0])


def test_an_error_reaches_everybody_who_waits(strict) -> None:
    constraint = Constraint("grammar", 'start: "a" b')
    barrier = threading.Barrier(4)

    def attempt(_: int) -> str:
        barrier.wait()
        with pytest.raises(ForerunError) as caught:
            strict.compile(constraint)
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(attempt, range(4)))) == 1
