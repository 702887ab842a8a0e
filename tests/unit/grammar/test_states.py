from __future__ import annotations

import json
import random
import re

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.grammar.conftest import PADDING, allowed

from forerun.constraint import Constraint
from forerun.errors import InvalidConstraint
from forerun.grammar import GrammarCompiler, GrammarState, unpack_masks
from forerun.grammar.masks import pack_masks
from forerun.text import TextCodec
from forerun.text.vocabulary import token_bytes

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ab"]}, "maxItems": 4},
        "child": {"$ref": "#/$defs/child"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"child": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}},
}
SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    {"type": "string", "pattern": "^[a-f]{2,5}$"},
    {"enum": ["one", 2, None, {"a": [True]}]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 6}]},
]
PATTERNS = ["a+b?c{2,4}", "(foo|bar)*baz", r"\d{3}-\d{4}", "[^a-z]{1,3}", "(a+)+$", "x*", "/?\n\"'"]
LARK = 'start: item (", " item)*\nitem: /[0-9]+/ | "(" start ")"\n'
CONSTRAINTS = [
    *map(Constraint.json_schema, SCHEMAS),
    *(Constraint("regex", pattern) for pattern in PATTERNS),
    Constraint.choice(["hello", "hello world", "help", "", 'B\u00e4r \U0001f600 "/\\']),
    Constraint("grammar", LARK),
]
COMPILERS = ["compiler", "fallback_compiler"]


@pytest.fixture(scope="session", params=COMPILERS)
def any_compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    return request.getfixturevalue(request.param)


def walk(state: GrammarState, noise: random.Random, max_tokens: int = 150) -> list[int]:
    """Choose uniformly among what is legal; end where it may end, now and then."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        (legal,) = allowed(state)
        ends = legal & state._kinds.eos_ids
        assert bool(ends) == state.may_end
        assert state.must_end <= (legal == ends)
        if ends and (legal == ends or noise.random() < 0.3):
            state.advance([min(ends)])
            return [*tokens, min(ends)]
        token = noise.choice(sorted(legal - ends))
        state.advance([token])
        tokens.append(token)
    return tokens


def text_of(state: GrammarState, tokens: list[int]) -> bytes:
    return b"".join(
        state._kinds.tokens[each] for each in tokens if each not in state._kinds.eos_ids
    )


def parse(text: bytes) -> object:
    # 1e999 is JSON, and more than a float holds.
    return json.loads(text.decode(), parse_float=lambda each: max(-1e300, min(1e300, float(each))))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), schema=st.sampled_from(SCHEMAS))
def test_every_walk_that_ends_is_json_of_the_schema(any_compiler, seed, schema) -> None:
    state = any_compiler.compile(Constraint.json_schema(schema)).start()
    tokens = walk(state, random.Random(seed))
    if tokens[-1] in state._kinds.eos_ids:
        assert jsonschema_rs.is_valid(schema, parse(text_of(state, tokens)))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), pattern=st.sampled_from(PATTERNS))
def test_every_walk_that_ends_matches_the_pattern(any_compiler, seed, pattern) -> None:
    state = any_compiler.compile(Constraint("regex", pattern)).start()
    tokens = walk(state, random.Random(seed))
    if tokens[-1] in state._kinds.eos_ids:
        assert re.fullmatch(pattern, text_of(state, tokens).decode())


def drafted(state: GrammarState, noise: random.Random, length: int) -> list[int]:
    """Tokens that are legal for a while: a walk on a state of its own, then anything."""
    draft = walk(state, noise, length)
    return [*draft, *(noise.randrange(-2, state._kinds.vocab_size + 3) for _ in range(2))]


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**32), constraint=st.sampled_from(CONSTRAINTS))
def test_drafts_are_counted_and_masked_as_token_by_token(any_compiler, seed, constraint) -> None:
    grammar = any_compiler.compile(constraint)
    noise = random.Random(seed)
    prefix = walk(grammar.start(), noise, noise.randrange(10))
    prefix = [each for each in prefix if each not in any_compiler._kinds.eos_ids]
    other = grammar.start()
    other.advance(prefix)
    draft = drafted(other, noise, noise.randrange(1, 8))
    state = grammar.start()
    state.advance(prefix)
    before = allowed(state), state.may_end, state.must_end

    slow = grammar.start()
    slow.advance(prefix)
    rows, count = [allowed(slow)[0]], 0
    for token in draft:
        if token not in rows[-1] or (count and draft[count - 1] in state._kinds.eos_ids):
            break
        slow.advance([token])
        rows.append(allowed(slow)[0])
        count += 1

    assert state.count_legal(draft) == count
    assert allowed(state, draft[:count]) == rows
    forced = state.likely_forced()
    assert state.count_legal(forced) == len(forced)
    assert (allowed(state), state.may_end, state.must_end) == before
    state.advance(draft[:count])
    assert allowed(state) == rows[-1:]


@settings(deadline=None, max_examples=30)
@given(
    choices=st.lists(
        st.one_of(st.text(max_size=8), st.sampled_from(["hello", "hello there", "the fox"])),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 2**32),
)
def test_choices_allow_what_spells_a_choice_and_nothing_else(any_compiler, choices, seed) -> None:
    compiler = any_compiler
    kinds = compiler._kinds
    state = compiler.compile(Constraint.choice(choices)).start()
    noise, said = random.Random(seed), b""
    for _ in range(40):
        expected = {
            token_id
            for token_id, own in enumerate(kinds.tokens[: kinds.vocab_size])
            if own
            and token_id not in compiler_special(compiler)
            and any(choice.encode().startswith(said + own) for choice in choices)
        }
        if said in [choice.encode() for choice in choices]:
            expected |= kinds.eos_ids
        (legal,) = allowed(state)
        assert legal == expected
        rest = sorted(legal - kinds.eos_ids)
        if not rest:
            assert state.must_end
            break
        token = noise.choice(rest)
        said += kinds.tokens[token]
        state.advance([token])


def compiler_special(compiler: GrammarCompiler) -> set[int]:
    return set(compiler._trials._vocabulary.special_ids)


def test_special_tokens_and_padding_are_never_text(compiler, byte_level: TextCodec) -> None:
    state = compiler.compile(Constraint("regex", "(?s:.*)")).start()
    (legal,) = allowed(state)
    assert legal & byte_level.special_ids == state._kinds.eos_ids
    assert max(legal) < byte_level.vocab_size
    quoted = compiler.compile(Constraint.json_schema({"type": "string"})).start()
    quoted.advance(byte_level.encode_plain('"'))
    (legal,) = allowed(quoted)
    assert not legal & byte_level.special_ids
    assert state.count_legal([byte_level.vocab_size + PADDING - 1]) == 0


@pytest.mark.parametrize("token", [-1, 10**9, 2**63])
def test_what_is_no_token_is_not_legal(compiler, token: int) -> None:
    state = compiler.compile(Constraint("regex", "a*")).start()
    assert state.count_legal([token]) == 0
    with pytest.raises(InvalidConstraint):
        state.advance([token])


def test_the_end(compiler, byte_level: TextCodec) -> None:
    state = compiler.compile(Constraint.choice(["ab", "abc"])).start()
    ends = state._kinds.eos_ids
    assert len(ends) == 2
    a, b, c = (byte_level.encode_plain(each)[0] for each in "abc")
    eos = byte_level.eos_id
    assert not state.may_end
    assert state.count_legal([a, eos]) == 1
    assert state.count_legal([a, b, eos, eos]) == 3
    assert state.count_legal([a, b, c, eos, a]) == 4
    state.advance([a, b])
    assert state.may_end
    assert not state.must_end
    assert allowed(state, [c, eos]) == [{c, *ends}, set(ends), set(ends)]
    state.advance([c])
    assert state.must_end
    state.advance([eos])
    assert state.must_end
    assert state.count_legal([eos]) == 0
    assert allowed(state) == [set(ends)]
    with pytest.raises(InvalidConstraint, match="after the end"):
        state.advance([eos])


def test_ending_too_early_is_an_error(compiler, byte_level: TextCodec) -> None:
    state = compiler.compile(Constraint.choice(["ab"])).start()
    with pytest.raises(InvalidConstraint, match="before it satisfied"):
        state.advance([byte_level.eos_id])


def test_a_vocabulary_without_end_of_text_ends_by_must_end(byte_level: TextCodec) -> None:
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [10**6])
    state = compiler.compile(Constraint.choice(["ab"])).start()
    state.advance(byte_level.encode_plain("ab"))
    assert state.must_end
    assert allowed(state) == [set()]
    compiler.close()


def test_forced_text_is_guessed_as_the_tokenizer_cuts_it(compiler, byte_level: TextCodec) -> None:
    grammar = compiler.compile(Constraint.choice(["the quick brown fox", "the quick brown dog"]))
    state = grammar.start()
    guess = state.likely_forced()
    assert guess == byte_level.encode_plain("the quick brown fox")[: len(guess)]
    assert byte_level.decode(guess).startswith("the quick")
    assert state.count_legal(guess) == len(guess)
    assert grammar.start().likely_forced(max_tokens=1) == guess[:1]
    whole = compiler.compile(Constraint.choice(["the quick"])).start()
    assert byte_level.decode(whole.likely_forced()) == "the quick"


def test_a_draft_that_leads_to_an_error_changes_nothing(compiler, byte_level: TextCodec) -> None:
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40))
    grammar = compiler.compile(Constraint("grammar", f'start: r0\n{rules}\nr40: "a"?\n'))
    a = byte_level.encode_plain("a")
    state = grammar.start()
    before = allowed(state)
    rows = allowed(state, a * 40)
    assert rows[-1] == set()
    assert allowed(state) == before
    state.count_legal(a * 60)
    assert allowed(state) == before
    for _ in range(rows.index(set()) - 1):
        state.masks([])
        state.advance(a)
    # The token after which nothing can be followed.
    with pytest.raises(InvalidConstraint, match=r"cannot be followed any further: .*Current row"):
        state.advance(a)


@pytest.mark.model
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_walks_over_a_real_vocabulary(real_compiler: GrammarCompiler, seed: int) -> None:
    state = real_compiler.compile(Constraint.json_schema(PERSON)).start()
    tokens = walk(state, random.Random(seed))
    if tokens[-1] in state._kinds.eos_ids:
        assert jsonschema_rs.is_valid(PERSON, parse(text_of(state, tokens)))


@given(st.integers(1, 4), st.integers(1, 100), st.integers(0, 2**32))
def test_packing_is_undone_by_unpacking(rows: int, vocab_size: int, seed: int) -> None:
    allowed = np.random.default_rng(seed).random((rows, vocab_size)) < 0.5
    masks = pack_masks(allowed)
    assert masks.dtype == np.int32
    assert np.array_equal(unpack_masks(masks, vocab_size), allowed)
    for row, token in np.argwhere(allowed):
        assert masks[row, token // 32] >> (token % 32) & 1


def test_tokens_of_the_vocabulary_are_those_of_the_codec(compiler, byte_level) -> None:
    tokens = token_bytes(byte_level, compiler._kinds.vocab_size)
    assert compiler._kinds.tokens == tokens
