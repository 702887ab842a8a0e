"""Filters: from logits to the distribution that a request asked for, for target and draft alike.

Order, as in vLLM: temperature, min-p, top-k, top-p; then typical-p. Nothing here draws a token.

Weights are whole numbers, 2^42 for the most probable token of a row. Sums of whole numbers are
exact in any order, so what survives and with which probability depends neither on the other rows of
the batch nor on how many columns were looked at. The price: a token 4.4e12 times less probable than
the first has probability 0.

On the CPU compiled kernels do all of this (`compiled`); what is written here is for other devices.

Ties: where the cut of top-k or top-p falls among equally likely tokens, all of them stay. So no
result hangs on the order in which a sort leaves equal values. Greedy takes the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..params import SamplingParams
from . import compiled
from .compiled import MAX_VOCABULARY
from .typical import atypical

__all__ = [
    "FilterParams",
    "bad_rows",
    "filtered_probs",
    "filtered_weights",
    "torch_weights",
    "whole",
]

UNIT = 2.0**42
TOP_P_COLUMNS = 512  # most probable tokens that top-p sorts before it sorts them all
TINY = torch.finfo(torch.float32).tiny
HUGE = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class FilterParams:
    """The filters of each row, with what the host must know of them so that no device is asked."""

    temperatures: Tensor  # [M] float32; 0: greedy
    top_ks: Tensor  # [M] int64; 0: off. A greedy row has 1
    top_ps: Tensor  # [M] float64; 1: off
    min_ps: Tensor  # [M] float32; 0: off
    typical_ps: Tensor  # [M] float64; 1: off
    max_top_k: int  # the largest of top_ks; 0: no row has top-k on
    all_top_k: bool  # every row has top-k on, or is greedy
    any_top_k: bool  # these four: of the rows that are not greedy
    any_top_p: bool
    any_min_p: bool
    any_typical: bool
    any_greedy: bool
    all_greedy: bool

    @staticmethod
    def from_params(
        rows: Sequence[SamplingParams], device: torch.device | str = "cpu"
    ) -> FilterParams:
        """Collect the filters of one request per row."""
        # Under float32's smallest normal number a temperature cannot be told from its limit, 0.
        asked = [row.temperature for row in rows]
        temperatures = [0.0 if value < TINY else min(value, HUGE) for value in asked]
        greedy = [temperature == 0 for temperature in temperatures]
        # A greedy row is the top-1 of its logits; its other filters cannot change it.
        top_ks = [
            1 if g else min(max(row.top_k, 0), MAX_VOCABULARY)
            for row, g in zip(rows, greedy, strict=True)
        ]
        top_ps = [1.0 if g else row.top_p for row, g in zip(rows, greedy, strict=True)]
        min_ps = [0.0 if g else row.min_p for row, g in zip(rows, greedy, strict=True)]
        typical_ps = [1.0 if g else row.typical_p for row, g in zip(rows, greedy, strict=True)]
        return FilterParams(
            temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
            top_ks=torch.tensor(top_ks, dtype=torch.int64, device=device),
            top_ps=torch.tensor(top_ps, dtype=torch.float64, device=device),
            min_ps=torch.tensor(min_ps, dtype=torch.float32, device=device),
            typical_ps=torch.tensor(typical_ps, dtype=torch.float64, device=device),
            max_top_k=max(top_ks, default=0),
            all_top_k=all(top_ks),
            any_top_k=any(k > 0 and not g for k, g in zip(top_ks, greedy, strict=True)),
            any_top_p=any(p < 1 for p in top_ps),
            any_min_p=any(p > 0 for p in min_ps),
            any_typical=any(p < 1 for p in typical_ps),
            any_greedy=any(greedy),
            all_greedy=all(greedy),
        )

    def repeat(self, counts: Tensor, num_rows: int) -> FilterParams:
        """Give request b's filters to its counts[b] consecutive rows; num_rows is counts' sum."""

        def spread(values: Tensor) -> Tensor:  # [B] -> [M]
            return values.repeat_interleave(counts, output_size=num_rows)

        return replace(
            self,
            temperatures=spread(self.temperatures),
            top_ks=spread(self.top_ks),
            top_ps=spread(self.top_ps),
            min_ps=spread(self.min_ps),
            typical_ps=spread(self.typical_ps),
        )

    def take(self, rows: Tensor) -> FilterParams:  # [R] int64
        """Give the filters of some rows; what the host knows stays that of all."""
        return replace(
            self,
            temperatures=self.temperatures[rows],
            top_ks=self.top_ks[rows],
            top_ps=self.top_ps[rows],
            min_ps=self.min_ps[rows],
            typical_ps=self.typical_ps[rows],
        )


def bad_rows(logits: Tensor) -> Tensor:  # [M, V] -> [M] bool
    """Find rows that are no distribution: NaN or +inf anywhere, or nothing above -inf."""
    if compiled.fits(logits):
        return compiled.bad_rows(logits)
    return ~logits.amax(-1).isfinite()  # amax hands NaN on


def filtered_probs(logits: Tensor, params: FilterParams) -> Tensor:  # [M, V] -> [M, V] float32
    """Compute the probabilities that each row's request asked for."""
    if not compiled.fits(logits):
        return _normalise(torch_weights(logits, params))
    probs = compiled.probabilities(logits, params)
    if params.any_typical:
        rows = (params.typical_ps < 1).nonzero().squeeze(-1)
        probs[rows] = _normalise(filtered_weights(logits[rows], params.take(rows)))
    return probs


def filtered_weights(logits: Tensor, params: FilterParams) -> Tensor:  # [M, V] -> [M, V] int64
    """Compute what `filtered_probs` normalises, as whole numbers; 0 marks what was filtered out.

    V may be any set of columns that holds every survivor of top-k, if every row has top-k on.
    """
    assert logits.shape[-1] <= MAX_VOCABULARY, "sums of weights must fit int64"
    if not compiled.fits(logits):
        return torch_weights(logits, params)
    weights = compiled.weights(logits, params)
    if params.any_typical:
        weights.masked_fill_(atypical(weights, params.typical_ps, UNIT), 0)
    return weights


def torch_weights(logits: Tensor, params: FilterParams) -> Tensor:  # [M, V] -> [M, V] int64
    """Do what `filtered_weights` does, in plain torch."""
    logits = logits.float()
    if params.all_greedy:
        return _argmax_weights(logits)
    greedy = params.temperatures == 0  # [M]
    divisors = torch.where(greedy, 1.0, params.temperatures).unsqueeze(-1)  # [M, 1]
    # The maximum goes first: 1e4 / 1e-6 is far from overflow, exp of it is not.
    odds = logits.sub(logits.amax(-1, keepdim=True)).div_(divisors).exp_()  # [M, V], 1 at the top
    if params.any_min_p:
        odds.masked_fill_(odds < params.min_ps.unsqueeze(-1), 0)
    if params.any_top_k:
        odds.masked_fill_(logits < _top_k_cuts(logits, params), 0)
    weights = whole(odds)
    if params.any_top_p:
        weights.masked_fill_(weights < _top_p_cuts(weights, params), 0)
    if params.any_typical:
        weights.masked_fill_(atypical(weights, params.typical_ps, UNIT), 0)
    if params.any_greedy:
        weights = torch.where(greedy.unsqueeze(-1), _argmax_weights(logits), weights)
    return weights


def _normalise(weights: Tensor) -> Tensor:  # [M, V] int64 -> [M, V] float32
    return (weights / weights.sum(-1, keepdim=True, dtype=torch.int64).double()).float()


def whole(odds: Tensor) -> Tensor:  # [..., V] in [0, 1] -> [..., V] int64
    """Turn odds into whole numbers whose sums are exact, rounding down."""
    return (odds * UNIT).to(torch.int64)


def _argmax_weights(logits: Tensor) -> Tensor:  # [M, V] -> [M, V] int64
    best = logits.argmax(-1, keepdim=True)  # [M, 1], the lowest id on ties
    return torch.zeros_like(logits, dtype=torch.int64).scatter_(-1, best, int(UNIT))


def _top_k_cuts(logits: Tensor, params: FilterParams) -> Tensor:  # [M, V] -> [M, 1]
    """Find each row's k-th largest logit, -inf where top-k is off."""
    width = min(params.max_top_k, logits.shape[-1])
    largest = logits.topk(width, dim=-1).values  # [M, width], falling
    ks = params.top_ks.clamp(1, width).unsqueeze(-1)
    cuts = largest.gather(-1, ks - 1)  # [M, 1]
    return cuts.masked_fill(params.top_ks.unsqueeze(-1) == 0, -torch.inf)


def _top_p_cuts(weights: Tensor, params: FilterParams) -> Tensor:  # [M, V] -> [M, 1]
    """Find the weight of the token at which each row's mass reaches top_p, 0 where it is off."""
    size = weights.shape[-1]
    off = (params.top_ps >= 1).unsqueeze(-1)  # [M, 1]
    needed = params.top_ps.unsqueeze(-1) * weights.sum(-1, keepdim=True).double()  # [M, 1]
    width = min(size, TOP_P_COLUMNS)
    cuts, short = _crossing(weights.topk(width, dim=-1).values, needed)
    short &= ~off
    if width < size and bool(short.any()):  # flat rows: their first columns hold too little
        rows = short.squeeze(-1).nonzero().squeeze(-1)
        falling = weights[rows].sort(dim=-1, descending=True).values
        cuts[rows], _ = _crossing(falling, needed[rows])
    return cuts.masked_fill(off, 0)


def _crossing(falling: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:  # -> [M, 1], [M, 1] bool
    """Find the weight with which the running sum reaches `needed`, and where it never does."""
    sums = falling.cumsum(-1).double()  # [M, W]
    index = (sums < needed).sum(-1, keepdim=True)  # that many tokens are not enough
    short = index >= falling.shape[-1]
    return falling.gather(-1, index.clamp_max(falling.shape[-1] - 1)), short
