"""A whole certificate on a tiny model: it holds, and it does not where something is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from forerun.cli import main
from forerun.cli.certify import _write
from forerun.config import SpeculationConfig
from forerun.draft import ngram
from forerun.engine import verify
from forerun.measure.certify import run as run_module
from forerun.measure.certify.enumeration import RuleCheck
from forerun.measure.certify.markdown import to_markdown
from forerun.measure.certify.prompts import CERTIFY_PROMPTS
from forerun.measure.certify.run import PLANS, certify
from forerun.measure.certify.wrong import WRONG_RULES
from forerun.sampling import RULES

TINY = replace(
    PLANS["quick"],
    num_prompts=4,
    num_tokens=24,
    greedy_ways=((0, 4), (3, 1), (15, 4)),
    seeded_ways=((3, 4),),
    num_samples=600,
    num_plain_samples=300,
    num_rule_samples=400,
    num_control_samples=1500,
)
PROMPTS = ["one two one two one two", "ab ab ab ab", "the quick brown fox the quick", "aaaa"]


class Silent:
    def __init__(self) -> None:
        self.titles: list[str] = []
        self.num_answers = 0

    def begin(self, title: str, total: int | None) -> None:
        self.titles.append(title)

    def advance(self) -> None:
        self.num_answers += 1


@pytest.fixture
def without_enumeration(monkeypatch):
    """Spare the seconds where a test is about something else."""
    exact = RuleCheck("token", 1, 1, True, Fraction(0))
    monkeypatch.setattr(run_module, "check_rule", lambda name, effort: exact)
    monkeypatch.setattr(run_module, "check_wrong_rules", lambda effort: {})


def make(tiny, plan=TINY, watcher=None, **speculation):
    return certify(
        str(tiny.folder),
        SpeculationConfig(**({"drafter": "ngram"} | speculation)),
        PROMPTS,
        plan,
        "forerun certify ...",
        watcher or Silent(),
        loop_text="=>?@ABC" * 6,  # the model calls for the next of these seven tokens
        dtype="float32",
        num_threads=1,
    )


@pytest.fixture(scope="module")
def repeating32(tmp_path_factory):
    """Text that often repeats itself, so that drafts are accepted; kernels that keep bits."""
    from reference.tiny import make_tiny

    folder = tmp_path_factory.mktemp("repeating32") / "model"
    return make_tiny(folder, habit=0.3, head_size=32)


@pytest.fixture(scope="module")
def certificate(repeating32):
    return make(repeating32, watcher=Silent())


def test_it_holds_and_every_wrong_rule_is_caught(certificate):
    assert certificate.faults == []
    assert certificate.holds
    assert {each.rule for each in certificate.rules} == set(RULES)
    assert {each.name for each in certificate.controls} == set(WRONG_RULES)
    assert all(each.caught for each in certificate.controls)
    assert all(each.caught for each in certificate.rule_controls)


def test_nothing_in_it_is_vacuous(certificate):
    for each in certificate.equality:
        assert each.num_tokens > 0
        if each.max_draft:
            assert 0 < each.num_accepted < each.num_drafted
    with_drafts = [each for each in certificate.distribution if each.rule != "none"]
    assert all(0 < each.num_accepted < each.num_drafted for each in with_drafts)
    assert {each.where for each in certificate.distribution} == {
        "token 1", "token 2", "token 3", "tokens 1-2",
    }  # fmt: skip
    num_tests = len(certificate.distribution) + 4 * len(certificate.controls)
    assert certificate.num_tests == num_tests, "the threshold is shared by all tests there are"
    assert 0.08 < certificate.detectable_shift < 0.25


def test_page_and_data_say_the_same(certificate):
    page, data = (
        to_markdown(certificate),
        json.loads(json.dumps(certificate.to_dict(), default=str)),
    )
    assert "**Held.**" in page
    assert data["holds"] is True
    assert data["subject"]["weights (sha256)"] in page
    for name in WRONG_RULES:
        assert name in page
    assert str(certificate.subject["model"]) == "model", "a folder's name, never its path"
    assert "/tmp" not in page


def test_a_wrong_rule_of_the_package_is_found_out(repeating32, monkeypatch):
    broken = dict(RULES) | {"token": WRONG_RULES["residual_forgotten"][0]}
    monkeypatch.setattr(run_module, "RULES", broken)
    monkeypatch.setattr("forerun.measure.certify.enumeration.RULES", broken)
    found = make(repeating32).faults
    assert "rule token is not exact" in found
    assert any("perturbed target, token" in fault for fault in found)


def test_an_engine_whose_drafts_change_tokens_is_found_out(
    repeating32, monkeypatch, without_enumeration
):
    """Logits move a little wherever a draft was verified: what unequal bits would do, enlarged."""
    right = verify.decide

    def moved(plan, guesses, logits, choose):
        if int(guesses.proposal.lengths.sum()):
            logits = logits + 0.3 * torch.sin(torch.arange(logits.shape[1]))
        return right(plan, guesses, logits, choose)

    monkeypatch.setattr("forerun.engine.core.decide", moved)
    certificate = make(repeating32)
    assert not certificate.holds
    assert any("texts differ" in fault for fault in certificate.faults)
    first = next(each.divergence for each in certificate.equality if each.divergence is not None)
    assert first.plain_token != first.other_token
    assert first.plain_margin >= 0
    assert "First divergence" in to_markdown(certificate)
    assert "**Did not hold.**" in to_markdown(certificate)


@pytest.mark.slow
def test_drafts_that_are_never_made_prove_nothing(repeating32, monkeypatch, without_enumeration):
    nothing = lambda self, requests: ngram.Proposal.empty(len(requests))  # noqa: E731
    monkeypatch.setattr(ngram.NgramDrafter, "propose", nothing)
    assert any("nothing was checked" in fault for fault in make(repeating32).faults)


@pytest.mark.slow
def test_with_the_token_rule_no_seeded_equality_is_claimed(repeating32, without_enumeration):
    certificate = make(repeating32, accept_rule="token")
    assert {each.kind for each in certificate.equality} == {"greedy"}
    assert "not promised" in str(certificate.seeded_note)
    assert certificate.faults == []


def test_page_and_data_are_written_side_by_side(certificate, tmp_path, capsys):
    _write(certificate, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == to_markdown(certificate)
    assert json.loads((tmp_path / "page.json").read_text())["holds"] is True
    _write(certificate, None)
    assert "**Held.**" in capsys.readouterr().out


def test_there_are_prompts_enough():
    assert len(CERTIFY_PROMPTS) >= max(plan.num_prompts for plan in PLANS.values())
    assert len({str(prompt) for prompt in CERTIFY_PROMPTS}) == len(CERTIFY_PROMPTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say --quick or --full"),
        (["--quick", "--full"], "say --quick or --full"),
        (["--quick", "--drafter", "none"], "nothing to certify without a drafter"),
        (["--quick", "--draft-tokens", "0"], "nothing to certify without a drafter"),
        (["--quick", "--out", "no/such/folder/page.md"], "there is no folder"),
        (["--quick", "--accept-rule", "typical"], "is not one of auto, point_mass, token, block"),
    ],
)
def test_bad_options(arguments, message, capsys, tiny):
    assert main(["certify", "--model", str(tiny.folder), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.model
def test_the_real_model_is_certified(tmp_path, capsys):
    page = tmp_path / "page.md"
    assert main(["certify", "--model", "smollm2-135m", "--quick", "--out", str(page)]) == 0
    assert "**Held.**" in page.read_text()
    assert json.loads((tmp_path / "page.json").read_text())["holds"] is True
