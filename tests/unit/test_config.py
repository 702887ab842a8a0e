"""Settings of the engine: bounds, spellings, unknown names."""

from __future__ import annotations

import pytest

from forerun.config import MAX_DRAFT, EngineConfig, SpeculationConfig
from forerun.draft.base import NoDrafter, check_drafter, drafter_names, make_drafter
from forerun.draft.ngram import NgramDrafter
from forerun.errors import ConfigError, UnknownOption


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_draft", -1), ("max_draft", MAX_DRAFT + 1), ("max_draft", 2.0), ("max_draft", True),
        ("max_draft", None), ("max_draft", "3"),
        ("prompt_lookup_min", 0), ("prompt_lookup_max", 33), ("prompt_lookup_min", 1.5),
        ("prompt_lookup_min", 5),
    ],
    ids=repr,
)  # fmt: skip
def test_speculation_refused(name, value):
    with pytest.raises(ConfigError) as caught:
        SpeculationConfig(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0), ("max_num_seqs", 4097), ("max_num_seqs", 1.0), ("max_num_seqs", True),
        ("max_num_batched_tokens", 0), ("max_num_batched_tokens", 63), ("block_size", 0),
        ("block_size", 1025), ("block_size", 33), ("max_model_len", 0), ("max_model_len", -1),
        ("max_model_len", 1.5),
        ("kv_cache_tokens", 0), ("num_threads", 0), ("dtype", "fp8"), ("dtype", None),
        ("dtype", []), ("kernels", "cuda"), ("kernels", 1),
    ],
    ids=repr,
)  # fmt: skip
def test_engine_refused(name, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


def test_the_defaults_are_valid_and_frozen():
    for config, name in ((SpeculationConfig(), "max_draft"), (EngineConfig(), "block_size")):
        with pytest.raises(AttributeError):
            setattr(config, name, 3)


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        (SpeculationConfig, "max_drafts", "max_draft"),
        (SpeculationConfig, "prompt_lookup", "prompt_lookup_m"),
        (EngineConfig, "max_num_seq", "max_num_seqs"),
        (EngineConfig, "dtyp", "dtype"),
        (EngineConfig, "enable_prefix_cache", "enable_prefix_caching"),
    ],
)
def test_unknown_options_name_the_nearest(kind, given, meant):
    with pytest.raises(UnknownOption, match=given) as caught:
        kind(**{given: 1})
    assert meant in str(caught.value)


def test_vllm_names_mean_ours():
    theirs = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
    assert SpeculationConfig.from_dict(theirs) == SpeculationConfig(
        drafter="ngram", max_draft=5, prompt_lookup_max=3
    )


def test_one_setting_in_two_spellings_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        SpeculationConfig.from_dict({"method": "ngram", "drafter": "none"})


def test_unknown_vllm_names_are_refused():
    with pytest.raises(UnknownOption, match="num_speculative_tokens"):
        SpeculationConfig.from_dict({"num_speculative_token": 5})


@pytest.mark.parametrize("name", ["n-gram", "eagle9", "", "NONE", 5, None, []], ids=repr)
def test_an_unknown_drafter_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        check_drafter(SpeculationConfig(drafter=name))
    assert repr(name) in str(caught.value)


def test_drafters_by_name():
    setting = None  # of these none looks at it
    assert {"none", "ngram", "auto"} <= set(drafter_names())
    assert isinstance(make_drafter(SpeculationConfig(drafter="none"), setting), NoDrafter)
    assert isinstance(make_drafter(SpeculationConfig(drafter="ngram"), setting), NgramDrafter)
    assert isinstance(
        make_drafter(SpeculationConfig(drafter="ngram", max_draft=0), setting), NoDrafter
    )
