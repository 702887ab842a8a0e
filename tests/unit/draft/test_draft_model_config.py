"""Draft models by name: settings, vLLM's spellings, what is refused before anything is loaded."""

from __future__ import annotations

import pytest

from forerun.cli.options import EngineOptions
from forerun.config import SpeculationConfig
from forerun.draft.base import check_drafter, drafter_names
from forerun.errors import ConfigError, ModelNotFound


def test_vllm_names_mean_ours():
    theirs = {
        "method": "draft_model",
        "model": "small",
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
    }
    assert SpeculationConfig.from_dict(theirs) == SpeculationConfig(
        drafter="draft-model", model="small", max_draft=5, draft_sampling="sampled"
    )
    eagle = SpeculationConfig.from_dict({"method": "eagle3", "model": "head"})
    assert (eagle.drafter, eagle.draft_sampling) == ("eagle", "greedy")
    ours = {"drafter": "draft-model", "model": "small", "draft_sampling": "greedy"}
    assert SpeculationConfig.from_dict(ours).drafter == "draft-model"


def test_one_setting_in_two_spellings_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        SpeculationConfig.from_dict({"draft_sampling": "greedy", "draft_sample_method": "greedy"})


@pytest.mark.parametrize("drafter", ["draft-model", "eagle", "medusa"])
def test_a_drafter_that_needs_a_model_says_so(drafter):
    with pytest.raises(ConfigError, match=f"drafter='{drafter}' needs a model"):
        SpeculationConfig(drafter=drafter)


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "none"])
def test_a_model_that_nobody_uses_is_refused(drafter):
    with pytest.raises(ConfigError, match=r"model='small' is of no use.*draft-model"):
        SpeculationConfig(drafter=drafter, model="small")


@pytest.mark.parametrize("value", ["", 5, [], True], ids=repr)
def test_a_model_is_a_name(value):
    with pytest.raises(ConfigError) as caught:
        SpeculationConfig(drafter="draft-model", model=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["random", None, 1], ids=repr)
def test_drafts_are_greedy_or_sampled(value):
    with pytest.raises(ConfigError, match="greedy, sampled"):
        SpeculationConfig(draft_sampling=value)


def test_the_registry_knows_it_and_looks_for_its_model(tmp_path):
    assert "draft-model" in drafter_names()
    check_drafter(SpeculationConfig(drafter="draft-model", model=str(tmp_path)))
    for drafter in ("draft-model", "auto"):
        with pytest.raises(ModelNotFound, match="nowhere"):
            check_drafter(SpeculationConfig(drafter=drafter, model=str(tmp_path / "nowhere")))


def test_the_command_line_names_it():
    options = EngineOptions(model="m", drafter="draft-model", draft_model="small")
    assert options.speculation() == {"drafter": "draft-model", "model": "small"}
    twice = EngineOptions(model="m", draft_model="a", speculative_config='{"model": "b"}')
    with pytest.raises(ConfigError, match="--draft-model and 'model'"):
        twice.speculation()
