from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.text import IncrementalDetokenizer, TextCodec


def slow_cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The slow twin: cut before the stop string completed first; the longest, if several are."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(codec: TextCodec, ids: list[int], stops: tuple[str, ...]) -> tuple[list[str], str | None]:
    detokenizer = IncrementalDetokenizer(codec, stop_strings=stops)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped is not None:
            break
    pieces.append(detokenizer.finish())
    return pieces, detokenizer.stopped


def letters(codec: TextCodec, text: str) -> list[int]:
    """One token for each letter, whatever merges the tokenizer has."""
    ids = [codec.encode_plain(letter) for letter in text]
    assert all(len(each) == 1 for each in ids)
    return [each[0] for each in ids]


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("abé你🎉", max_size=24),
    stops=st.lists(st.text("abé你🎉", min_size=1, max_size=5), min_size=1, max_size=4),
)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_law_with_stop_strings(
    request: pytest.FixtureRequest, name: str, text: str, stops: list[str]
) -> None:
    codec: TextCodec = request.getfixturevalue(name)
    ids = codec.encode_plain(text)
    pieces, stopped = run(codec, ids, tuple(stops))
    assert ("".join(pieces), stopped) == slow_cut(codec.decode(ids), tuple(stops))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_law_with_stop_strings_over_random_ids(byte_level: TextCodec, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), min_size=1, max_size=30))
    text = byte_level.decode(ids)
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stop = text[start : start + data.draw(st.integers(1, 8))] or "x"
    pieces, stopped = run(byte_level, ids, (stop,))
    assert ("".join(pieces), stopped) == slow_cut(text, (stop,))


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_stop_string_split_over_tokens(byte_level: TextCodec, cut: int) -> None:
    ids = [
        *letters(byte_level, "x"),
        *byte_level.encode_plain("STOP"[:cut]),
        *byte_level.encode_plain("STOP"[cut:]),
    ]
    pieces, stopped = run(byte_level, ids, ("STOP",))
    assert pieces[0] == "x"
    assert set(pieces[1:]) == {""}
    assert stopped == "STOP"


def test_what_could_become_a_stop_string_waits_and_is_sent_when_it_did_not(
    byte_level: TextCodec,
) -> None:
    pieces, stopped = run(byte_level, letters(byte_level, "xSTOx"), ("STOP",))
    assert pieces == ["x", "", "", "", "STOx", ""]
    assert stopped is None


def test_the_rest_is_flushed_at_the_end(byte_level: TextCodec) -> None:
    pieces, stopped = run(byte_level, letters(byte_level, "xSTO"), ("STOP",))
    assert pieces == ["x", "", "", "", "STO"]
    assert stopped is None


def test_a_failed_start_can_hold_the_true_one(byte_level: TextCodec) -> None:
    pieces, stopped = run(byte_level, letters(byte_level, "aaab"), ("aab",))
    assert pieces == ["", "", "a", "", ""]
    assert stopped == "aab"


def test_the_stop_string_completed_first_ends_the_text(byte_level: TextCodec) -> None:
    for ids in (letters(byte_level, "xabcd"), byte_level.encode_plain("xabcd")):
        assert run(byte_level, ids, ("abcd", "bc"))[1] == "bc"
        assert "".join(run(byte_level, ids, ("abcd", "bc"))[0]) == "xa"


def test_of_those_completed_together_the_longest_counts(byte_level: TextCodec) -> None:
    for stops in (("bc", "abc"), ("abc", "bc")):
        pieces, stopped = run(byte_level, letters(byte_level, "xabc"), stops)
        assert ("".join(pieces), stopped) == ("x", "abc")


def test_the_token_that_completes_it_is_the_last_and_its_rest_is_dropped(
    byte_level: TextCodec,
) -> None:
    (token,) = byte_level.encode_plain(" the")
    detokenizer = IncrementalDetokenizer(byte_level, stop_strings=("t",))
    assert detokenizer.push(token) == " "
    assert detokenizer.stopped == "t"
    assert detokenizer.finish() == ""
    assert detokenizer.text == " "


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_stop_string_of_split_characters_needs_its_last_byte(
    request: pytest.FixtureRequest, name: str
) -> None:
    codec: TextCodec = request.getfixturevalue(name)
    ids = codec.encode_plain("x🎉")
    detokenizer = IncrementalDetokenizer(codec, stop_strings=("🎉",))
    for token_id in ids[:-1]:
        detokenizer.push(token_id)
        assert detokenizer.stopped is None
    assert detokenizer.push(ids[-1]) == ""
    assert (detokenizer.stopped, detokenizer.text) == ("🎉", "x")


def test_a_stop_string_that_only_the_end_completes(byte_level: TextCodec) -> None:
    ids = byte_level.encode_plain("x🎉")[:-1]
    pieces, stopped = run(byte_level, ids, ("\ufffd",))
    assert ("".join(pieces), stopped) == ("x", "\ufffd")


def test_special_tokens_are_no_text_to_stop_at_unless_shown(byte_level: TextCodec) -> None:
    assert byte_level.eos_id is not None
    for skip in (True, False):
        detokenizer = IncrementalDetokenizer(
            byte_level, stop_strings=("<|im_end|>",), skip_special=skip
        )
        detokenizer.push(byte_level.eos_id)
        assert (detokenizer.stopped is None) is skip


def test_a_stop_string_is_not_found_across_the_prompts_border(byte_level: TextCodec) -> None:
    detokenizer = IncrementalDetokenizer(
        byte_level, stop_strings=("ab",), prompt_tail=letters(byte_level, "a")
    )
    assert detokenizer.push(letters(byte_level, "b")[0]) == "b"
    assert detokenizer.stopped is None
