"""Which tokens of two vocabularies are the same one, and what way there is between them."""

from __future__ import annotations

import pytest
from reference.tiny_draft import make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

from forerun.draft.context import TokenContext, UnknownToken
from forerun.draft.vocabulary import NO_TOKEN, LinkKind, Side, link_vocabularies
from forerun.errors import UnsupportedModel

WORDS = ["abc", " the", "ing", "你"]


def side(tokenizer, *, size=None, bos=None, eos=(), adds_bos=False):
    size = size or tokenizer.get_vocab_size()
    return Side(tokenizer, size, bos, eos, adds_bos)


def mute_tokenizer(words):
    """A vocabulary of words alone."""
    vocab = {word: index for index, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def read(link, tokens):
    context = TokenContext(link)
    context.update(tokens)
    return context.ids


def test_equal_vocabularies_pass_ids_through():
    link = link_vocabularies(side(make_tokenizer(WORDS)), side(make_tokenizer(WORDS)))
    assert (link.kind, link.spellers) == (LinkKind.SAME, None)
    assert read(link, [1, 2, 3]) == [1, 2, 3]
    assert TokenContext(link).guess([4, 5, 6], 2) == [4, 5]


@pytest.mark.parametrize(("ours", "theirs"), [(300, 280), (280, 300)])
def test_padding_is_no_difference(ours, theirs):
    """But what only one side's logits have is not drafted, and not read."""
    size = make_tokenizer(WORDS).get_vocab_size()
    assert size < 280
    link = link_vocabularies(
        side(make_tokenizer(WORDS), size=ours), side(make_tokenizer(WORDS), size=theirs)
    )
    assert link.kind is LinkKind.SAME
    assert link.map.choices == list(range(280))
    if ours > theirs:
        with pytest.raises(UnknownToken):
            read(link, [1, 290])
    else:
        assert read(link, [1, 279]) == [1, 279]


def test_tokens_that_spell_the_same_are_the_same():
    ours, theirs = make_tokenizer(WORDS), make_tokenizer(["xyz", *reversed(WORDS)])
    link = link_vocabularies(side(ours), side(theirs))
    assert link.kind is LinkKind.SHARED
    for text in ("abc", " the", "ing", "a", "\n"):
        (token,) = ours.encode(text).ids
        (other,) = theirs.encode(text).ids
        assert link.map.to_draft[token] == other
        assert link.map.to_target[other] == token
    assert link.map.to_target[theirs.encode("xyz").ids[0]] == NO_TOKEN
    assert theirs.encode("xyz").ids[0] not in link.map.choices
    assert link.map.share == 1.0


def test_a_special_token_is_not_the_text_of_its_name():
    ours = make_tokenizer(WORDS, specials=["<e>"])
    theirs = make_tokenizer([*WORDS, "<e>"], specials=["<other>"])
    link = link_vocabularies(side(ours), side(theirs))
    assert link.map.to_draft[ours.token_to_id("<e>")] == NO_TOKEN


def test_what_begins_and_ends_texts_is_matched_by_its_role():
    ours = make_tokenizer(WORDS, specials=["<s>", "</s>"])
    theirs = make_tokenizer([*WORDS, "q"], specials=["<begin>", "<end>", "<eot>"])
    bos, eos = ours.token_to_id("<s>"), ours.token_to_id("</s>")
    begin, end, eot = (theirs.token_to_id(name) for name in ("<begin>", "<end>", "<eot>"))
    link = link_vocabularies(
        side(ours, bos=bos, eos=(eos,)), side(theirs, bos=begin, eos=(end, eot))
    )
    assert read(link, [bos, 5, eos]) == [begin, link.map.to_draft[5], end]
    assert TokenContext(link).guess([end, eot], 2) == [eos, eos]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_texts_begin_as_the_draft_model_has_them(adds_bos):
    ours = make_tokenizer(WORDS, specials=["<s>"])
    theirs = make_tokenizer([*WORDS, "qq"], specials=["<begin>"])
    bos, begin = ours.token_to_id("<s>"), theirs.token_to_id("<begin>")
    with_one = link_vocabularies(side(ours), side(theirs, bos=begin, adds_bos=adds_bos))
    body = [with_one.map.to_draft[5]]
    assert read(with_one, [5]) == ([begin, *body] if adds_bos else body)
    without = link_vocabularies(side(ours, bos=bos), side(theirs))
    assert read(without, [bos, 5]) == body


def test_a_token_without_like_changes_nothing():
    ours, theirs = make_tokenizer([*WORDS, "zzz"]), make_tokenizer(WORDS)
    link = link_vocabularies(side(ours), side(theirs))
    odd = ours.encode("zzz").ids[0]
    context = TokenContext(link)
    context.update([1])
    with pytest.raises(UnknownToken, match=str(odd)):
        context.update([1, 2, odd])
    assert context.ids == [link.map.to_draft[1]]
    assert context.update([1, 2]) == 1
    assert len(context.ids) == 2


def test_few_shared_tokens_leave_text():
    many = [chr(code) + "x" for code in range(0x400, 0x400 + 300)]
    link = link_vocabularies(side(make_tokenizer(many)), side(make_tokenizer([])))
    assert link.map.share < 0.5
    assert link.kind is LinkKind.TEXT


@pytest.mark.parametrize("whose", ["target's", "draft model's"])
def test_without_text_or_shared_tokens_there_is_no_way(whose):
    mute, able = side(mute_tokenizer(["hello", "world"])), side(make_tokenizer(WORDS))
    pair = (mute, able) if whose == "target's" else (able, mute)
    with pytest.raises(UnsupportedModel, match=f"the {whose} tokenizer cannot spell any text"):
        link_vocabularies(*pair)


def test_without_text_shared_tokens_are_a_way():
    ours = mute_tokenizer(["hello", "world", "again"])
    theirs = mute_tokenizer(["again", "world", "hello", "more"])
    link = link_vocabularies(side(ours), side(theirs))
    assert (link.kind, link.spellers) == (LinkKind.SHARED, None)
    assert read(link, ours.encode("hello world").ids) == theirs.encode("hello world").ids
