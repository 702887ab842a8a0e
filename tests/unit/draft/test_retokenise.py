"""Text between vocabularies: requests in other tokens as they grow, drafts on their way back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.tiny_draft import make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers

from forerun.draft.retokenise import TextContext
from forerun.draft.speller import Speller
from forerun.draft.vocabulary import Link, LinkKind, Side, TokenMap, link_vocabularies

OURS = make_tokenizer([" the", "fox", " foxes", "你好", "12", " jumps", "é"])
THEIRS = make_tokenizer([" th", "ox", " fo", "123", " jump", "s ", "好"])


def sentencepiece(words):
    """A tokenizer of Llama's kind: a space before every text, and tokens for bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges = []
    for word in words:
        for letter in word:
            vocab.setdefault(letter, len(vocab))
        for end in range(1, len(word)):
            if word[: end + 1] not in vocab:
                vocab[word[: end + 1]] = len(vocab)
                merges.append((word[:end], word[end]))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )  # fmt: skip
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


LETTERS = "abcdefghijklmnopqrstuvwxyz▁0123456789.,"
LLAMA = sentencepiece(["▁the", "fox", "▁jumps", *LETTERS])
PAIRS = {
    "byte level": (OURS, THEIRS),
    "to words": (OURS, LLAMA),
    "from words": (LLAMA, OURS),
    "words": (LLAMA, sentencepiece(["▁fox", "▁ju", "mps", *LETTERS])),
}


def link(ours, theirs, **options):
    """Have text be the way, whatever is shared."""
    sides = [Side(each, each.get_vocab_size(), None, ()) for each in (ours, theirs)]
    made = link_vocabularies(sides[0], sides[1])
    spellers = tuple(Speller(each, each.get_vocab_size()) for each in (ours, theirs))
    return Link(LinkKind.TEXT, made.target, made.draft, made.map, spellers)


def follow(made, tokens, cuts):
    """Let a request grow as the cuts say; the laws of `update` are checked on the way."""
    context = TextContext(made)
    ends = sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})
    for end in [each for each in ends if each]:
        before = list(context.ids)
        changed = context.update(tokens[:end])
        assert context.ids[:changed] == before[:changed]
        assert changed <= len(context.ids)
    return context


WORDS = st.lists(
    st.sampled_from(
        ["the", " the", " fox", "fox", " foxes", "你好", " 你好", "12", "123", "4", " jumps", ".",
         "\n", "  ", " ", "é", "naïve", "\t", "🙂", " x", "'s", "don't"]
    ),
    min_size=1, max_size=14,
)  # fmt: skip


@pytest.mark.parametrize("kind", PAIRS)
@settings(max_examples=150, deadline=None)
@given(words=WORDS, cuts=st.lists(st.integers(1, 40), max_size=8))
def test_growing_text_is_cut_as_the_whole_is(kind, words, cuts):
    ours, theirs = PAIRS[kind]
    text = "".join(words)
    tokens = ours.encode(text, add_special_tokens=False).ids
    made = link(ours, theirs)
    context = follow(made, tokens, cuts)
    whole = theirs.encode(text, add_special_tokens=False).ids
    assert context.ids == whole
    spelled = made.spellers[1].spell(context.ids).decode()
    assert spelled == (" " + text if made.spellers[1].adds_space else text)


@pytest.mark.parametrize("kind", PAIRS)
@settings(max_examples=150, deadline=None)
@given(words=WORDS, more=WORDS, most=st.integers(1, 12))
def test_a_guess_is_the_beginning_of_what_was_drafted(kind, words, more, most):
    ours, theirs = PAIRS[kind]
    made = link(ours, theirs)
    context = follow(made, ours.encode("".join(words), add_special_tokens=False).ids, [])
    drafted = made.spellers[1].encode_inside(" " + "".join(more))
    if drafted is None:
        return
    guessed = context.guess(drafted, most)
    assert len(guessed) <= most
    spelled = made.spellers[0].spell(guessed)
    text = made.spellers[1].spell(drafted)
    assert text.startswith(spelled)
    assert not guessed or len(spelled) < len(text), "the last token might have been another"


def test_a_guess_is_cut_as_the_target_would_go_on():
    context = follow(link(OURS, THEIRS), OURS.encode("a fox").ids, [])
    drafted = THEIRS.encode(" jumps the foxes").ids
    want = OURS.encode(" jumps the foxes").ids
    assert context.guess(drafted, 9) == want[:-1]
    assert context.guess(drafted, 1) == want[:1]


def test_committed_tokens_stay_as_they_were_cut():
    """ "fox" stands there already: " foxes" cannot come of it, "es" can."""
    tokens = [*OURS.encode("a").ids, *OURS.encode(" ").ids, *OURS.encode("fox").ids]
    context = follow(link(OURS, THEIRS), tokens, [])
    drafted = THEIRS.encode("es jumps the").ids
    want = [*OURS.encode("es").ids, *OURS.encode(" jumps").ids]
    assert context.guess(drafted, 9) == want


def test_half_a_character_is_completed_or_nothing_is_guessed():
    made = link(OURS, THEIRS)
    first, *rest = OURS.encode("🙂 the fox").ids
    context = TextContext(made)
    context.update([*OURS.encode("a fox").ids, first])
    assert context.ids == THEIRS.encode("a fox").ids, "half a character is no text"
    drafted = THEIRS.encode("🙂 the fox jumps").ids
    assert context.guess(drafted, 4) == rest[:4]
    assert context.guess(THEIRS.encode(" the fox").ids, 4) == []
    context.update([*OURS.encode("a fox").ids, first, *rest])
    assert context.ids == THEIRS.encode("a fox🙂 the fox").ids


def test_bytes_that_are_no_text_are_read_as_such():
    """A model may say anything; the draft model reads a sign for it, and goes on."""
    broken = [OURS.token_to_id("Ģ"), OURS.token_to_id("Ģ")]  # continuation bytes without a start
    tokens = [*OURS.encode("a fox").ids, *broken, *OURS.encode(" the").ids]
    context = follow(link(OURS, THEIRS), tokens, [1, 3, 5, 6])
    assert THEIRS.decode(context.ids) == "a fox\ufffd\ufffd the"
    assert context.guess(THEIRS.encode(" jumps fox").ids, 1) == OURS.encode(" jumps").ids


def test_a_draft_that_is_no_text_guesses_its_whole_characters():
    context = follow(link(OURS, THEIRS), OURS.encode("a fox").ids, [])
    whole = THEIRS.encode(" the 你").ids
    assert context.guess(whole[:-1], 9) == OURS.encode(" the").ids
    assert context.guess([THEIRS.token_to_id("Ģ")], 9) == []
    assert context.guess([], 9) == []


def test_an_end_of_text_ends_what_is_guessed():
    ours = make_tokenizer([" the"], specials=["<end>"])
    theirs = make_tokenizer([" th"], specials=["<eot>"])
    ends = ours.token_to_id("<end>"), theirs.token_to_id("<eot>")
    target = Side(ours, ours.get_vocab_size(), None, ends[:1])
    draft = Side(theirs, theirs.get_vocab_size(), None, ends[1:])
    made = link_vocabularies(target, draft)
    context = TextContext(made)
    context.update(ours.encode("a").ids)
    drafted = [*theirs.encode(" the").ids, ends[1], *theirs.encode("junk").ids]
    # Nothing follows, so its last token cannot become another.
    assert context.guess(drafted, 9) == [*ours.encode(" the").ids, ends[0]]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_begins_as_the_draft_models_do(adds_bos):
    ours = make_tokenizer(["fox"], specials=["<s>"])
    theirs = make_tokenizer(["ox"], specials=["<begin>"])
    bos, begin = ours.token_to_id("<s>"), theirs.token_to_id("<begin>")
    target = Side(ours, ours.get_vocab_size(), bos, ())
    draft = Side(theirs, theirs.get_vocab_size(), begin, (), adds_bos)
    made = link_vocabularies(target, draft)
    body = theirs.encode("a fox").ids
    for start in ([bos], []):
        context = TextContext(made)
        context.update([*start, *ours.encode("a fo").ids])
        context.update([*start, *ours.encode("a fo").ids, *ours.encode("x").ids])
        assert context.ids == ([begin, *body] if start or adds_bos else body)


def test_a_tokenizer_that_changes_text_is_asked_for_the_whole_again():
    theirs = make_tokenizer(["fox"])
    theirs.normalizer = normalizers.Lowercase()
    made = Link(
        LinkKind.TEXT,
        Side(OURS, OURS.get_vocab_size(), None, ()),
        Side(theirs, theirs.get_vocab_size(), None, ()),
        TokenMap([-1] * OURS.get_vocab_size(), [-1] * theirs.get_vocab_size(), 0.0),
        (Speller(OURS, OURS.get_vocab_size()), Speller(theirs, theirs.get_vocab_size())),
    )
    context = TextContext(made)
    for text in ("A Fox", "A Fox and a FOX", "A Fox and a FOX, again"):
        context.update(OURS.encode(text).ids)
        assert context.ids == theirs.encode(text).ids


def test_lengths_follow_how_the_request_is_cut():
    made = link(OURS, make_tokenizer([]))
    context = follow(made, OURS.encode(" the fox jumps").ids, [])
    assert len(context.ids) == 14
    # " the", " ", "fox", " jumps": 14 letters for 4 tokens, so 18 for 5, and one to be dropped
    assert context.length(5) == 19
    assert TextContext(made).length(5) == 6


def test_spelling():
    for tokenizer in (OURS, THEIRS, LLAMA):
        speller = Speller(tokenizer, tokenizer.get_vocab_size())
        assert speller.spells_any_text
        for text in (" the fox", " 你好🙂", " x\ty"):
            assert speller.spell(speller.encode_inside(text)) == text.encode()
    assert Speller(LLAMA, LLAMA.get_vocab_size()).encode_inside("fox") is None
    assert Speller(OURS, 100).encode_inside("你好") is None, "of tokens without logits"
