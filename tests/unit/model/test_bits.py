"""Which row counts give equal bits is found by trying, and layers keep to what was found.

The fakes here change a row's bits with the number of rows beside it, as real libraries do.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from forerun.model import bits
from forerun.model.bits import PROMPT_PIECE, ExactRows, find_class, in_pieces, try_rows
from forerun.model.linear import pack_linear


class Moody:
    """A linear layer that rounds otherwise in each class of row counts."""

    def __init__(self, *borders: int, num_inputs: int = 8) -> None:
        self.borders = borders  # a class ends with each of them
        self.weight = torch.randn(16, num_inputs, generator=torch.Generator().manual_seed(1))
        self.seen: list[int] = []

    def __call__(self, x):
        self.seen.append(len(x))
        mood = sum(len(x) > border for border in self.borders)
        # one row at a time: the multiplication itself must not have moods of its own
        rows = [functional.linear(row.unsqueeze(0), self.weight) for row in x]
        return torch.cat(rows) * (1 + mood * 2**-20)


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(512, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("borders", "expected"),
    [
        ((), (1, 512)),
        ((1,), (2, 512)),  # one row has a kernel of its own
        ((32,), (1, 32)),
        ((1, 32), (2, 32)),
        ((1, 3), (4, 512)),
        ((4,), (1, 4)),
        ((1, 2, 3, 4, 5, 6, 7), (4, 4)),  # nothing agrees with another that is tried
    ],
)
def test_the_class_that_reaches_furthest_is_found(borders, expected, rows):
    assert find_class(Moody(*borders), rows) == expected


def test_a_layer_whose_rows_depend_on_their_place_has_no_class(rows):
    def by_place(x):
        return x * (1 + torch.arange(len(x)).unsqueeze(1) * 2**-20)

    fewest, most = find_class(by_place, rows)
    assert (fewest, most) == (1, 1)


def test_pieces_keep_every_rows_bits(rows):
    layer = Moody(32, 100, 127, 128)
    whole = in_pieces(layer, rows[:200], num_fine=70, max_rows=32)
    assert torch.equal(whole[:70], torch.cat([layer(row) for row in rows[:70].split(1)]))
    for first in (70, 150):  # a prompt's rows, in other pieces and company
        again = in_pieces(layer, rows[first:200], num_fine=0, max_rows=32)
        assert torch.equal(again, whole[first:])
    assert layer.seen[:3] == [32, 32, 6]
    assert layer.seen[3:5] == [PROMPT_PIECE, PROMPT_PIECE]


def test_rows_of_one_kind_alone(rows):
    assert in_pieces(Moody(), rows[:5], 5, 32).shape == (5, 16)
    assert in_pieces(Moody(), rows[:5], 0, 32).shape == (5, 16)


def test_padding_is_not_seen(rows):
    layer = Moody(1)
    padded = ExactRows((((8, 16), 2),), 512, False, 1.0).pad((8, 16), layer)
    assert torch.equal(padded(rows[:1]), padded(rows[:9])[:1])
    assert padded(rows[:1]).shape == (1, 16)
    assert min(layer.seen) == 2


SHAPES = [(64, 96), (96, 64), (64, 96)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_found_on_this_machine_holds(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    found = try_rows(SHAPES, dtype, 64)
    assert dict(found.min_rows).keys() == set(SHAPES)
    assert found.cost >= 1
    dice = torch.Generator().manual_seed(9)
    for shape in set(SHAPES):
        weight = torch.randn(shape[1], shape[0], generator=dice).to(dtype)
        layer = found.pad(shape, pack_linear(weight))
        x = torch.randn(found.max_rows, shape[0], generator=dice).to(dtype)
        together = layer(x)
        for row in range(len(x)):
            assert torch.equal(layer(x[row : row + 1]), together[row : row + 1])


def test_a_machine_is_tried_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    first = try_rows(SHAPES, torch.float32, 16)

    def never(*_: object) -> None:
        raise AssertionError("tried again")

    monkeypatch.setattr(bits, "_try_all", never)
    assert try_rows(SHAPES, torch.float32, 16) == first
    with pytest.raises(AssertionError, match="tried again"):
        try_rows(SHAPES, torch.float32, 17)  # another question


def test_a_damaged_finding_is_tried_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    first = try_rows(SHAPES, torch.float32, 16)
    (file,) = (tmp_path / "bits").glob("*.json")
    file.write_text('{"max_rows": ')
    assert try_rows(SHAPES, torch.float32, 16).max_rows == first.max_rows
    assert "min_rows" in file.read_text()
