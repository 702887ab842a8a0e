"""Many short outputs against the exact probability of each, by chi-square."""

from __future__ import annotations

from collections import Counter

from scipy import stats

SIGMA5 = float(stats.norm.sf(5))


def p_value(counts, joint, num_positions):
    """Chi-square of the first `num_positions` tokens; cells under 10 are put together."""
    seen, expected = Counter(), Counter()
    for output, count in counts.items():
        seen[output[:num_positions]] += count
    total = sum(counts.values())
    for output, p in joint.items():
        expected[output[:num_positions]] += p * total
    assert all(cell in expected for cell in seen), "an output that the filters forbid"
    small = [cell for cell, count in expected.items() if count < 10]
    observed = [seen[cell] for cell in expected if expected[cell] >= 10]
    wanted = [count for count in expected.values() if count >= 10]
    rest = sum(expected[cell] for cell in small)
    if rest >= 5:
        observed.append(sum(seen[cell] for cell in small))
        wanted.append(rest)
    scale = sum(observed) / sum(wanted)
    assert abs(scale - 1) < 1e-2
    assert len(wanted) >= 5
    return float(stats.chisquare(observed, [count * scale for count in wanted]).pvalue)
