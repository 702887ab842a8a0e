"""The cache's tensors: what was written is read, in both layouts; nothing else moves."""

from __future__ import annotations

import pytest
import torch

from forerun.cache.kv_cache import CacheShape, KVCache

CPU = torch.device("cpu")
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


def make_cache(dtype: torch.dtype, block_size: int = 8, head_size: int = 6) -> KVCache:
    shape = CacheShape(
        num_layers=2, num_kv_heads=3, head_size=head_size, block_size=block_size, dtype=dtype
    )
    return KVCache(shape, num_blocks=9, device=CPU)


def draw(cache: KVCache, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, cache.shape.num_kv_heads, cache.shape.head_size)
    return torch.randn(shape, generator=generator).to(cache.shape.dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("block_size", [2, 8, 32])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17])
def test_written_positions_come_back(dtype, block_size, length):
    cache = make_cache(dtype, block_size)
    assert cache.shape.pack == (1 if dtype == torch.float32 else 2)
    blocks = torch.tensor([7, 2, 5, 0, 8, 3, 1, 4, 6])
    positions = torch.arange(length)
    keys, values = draw(cache, length, 1), draw(cache, length, 2)
    for part in positions.split(3):  # as chunks of a prompt would come
        cache.write(1, blocks[part // block_size], part % block_size, keys[part], values[part])
    for shown in range(1, length + 1):
        needed = blocks[: -(-shown // block_size)]
        found_keys, found_values = cache.gather(1, needed, shown)
        assert torch.equal(found_keys, keys[:shown].transpose(0, 1))
        assert torch.equal(found_values, values[:shown].transpose(0, 1))
    assert not cache.keys[0].any()
    assert not cache.values[0].any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_one_write_serves_many_requests(dtype):
    cache = make_cache(dtype)
    blocks, offsets = torch.tensor([4, 0, 8, 4]), torch.tensor([7, 0, 3, 2])
    keys, values = draw(cache, 4, 1), draw(cache, 4, 2)
    cache.write(0, blocks, offsets, keys, values)
    for row, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
        found_keys, found_values = cache.gather(0, block.reshape(1), 8)
        assert torch.equal(found_keys[:, offset], keys[row])
        assert torch.equal(found_values[:, offset], values[row])
    assert int((cache.keys != 0).sum()) <= keys.numel()
    assert not cache.keys[:, [1, 2, 3, 5, 6, 7]].any()
    assert not cache.values[:, [1, 2, 3, 5, 6, 7]].any()


def test_rewriting_a_position_replaces_it_alone():
    cache = make_cache(torch.bfloat16)
    blocks = torch.tensor([3])
    first, second = draw(cache, 8, 1), draw(cache, 1, 2)
    cache.write(0, blocks.expand(8), torch.arange(8), first, first)
    cache.write(0, blocks, torch.tensor([5]), second, second)
    expected = first.clone()
    expected[5] = second[0]
    for found in cache.gather(0, blocks, 8):
        assert torch.equal(found, expected.transpose(0, 1))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("offset", [0, 1, 2, 5, 7])
def test_scrub_zeroes_values_from_a_place_on_in_every_layer(dtype, offset):
    cache = make_cache(dtype)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    cache.scrub(6, offset)
    for layer in range(cache.shape.num_layers):
        _, values = cache.gather(layer, torch.tensor([6]), 8)
        assert not values[:, offset:].any()
        assert values[:, :offset].isnan().all()
    assert cache.values[:, [0, 1, 2, 3, 4, 5, 7, 8]].isnan().all()
    assert cache.keys.isnan().all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_block_costs_what_it_says(dtype):
    cache = make_cache(dtype)
    total = cache.keys.nbytes + cache.values.nbytes
    assert total == cache.num_blocks * cache.shape.block_bytes
    assert not cache.keys.any()
    assert not cache.values.any()


@pytest.mark.parametrize("block_size", [1, 3, 33])
def test_odd_block_sizes_where_nothing_is_paired(block_size):
    cache = make_cache(torch.float32, block_size)
    keys = draw(cache, block_size)
    blocks = torch.zeros(block_size, dtype=torch.int64)
    cache.write(0, blocks, torch.arange(block_size), keys, keys)
    for found in cache.gather(0, blocks[:1], block_size):
        assert torch.equal(found, keys.transpose(0, 1))
