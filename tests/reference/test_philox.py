"""Philox4x32-10 and the random bits of stochastic rounding against a scalar model.

Legend: R plane rows, G groups of 16 along the contraction; sources are [G, 16, R].
"""

from __future__ import annotations

import pytest
import torch

from dist_finegrain.reference import nvfp4
from dist_finegrain.reference.philox import content_hash, philox4x32, rounding_bits
from tests.special_values import DTYPES, every_magnitude, with_nonfinite

from . import exact_nvfp4

KEY = {"seed": 0x89ABCDEF, "stream": 0xFEDCBA98, "step": 0x80000001}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def source_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` [R, C], both multiples of 16, as [G, 16, R]."""
    return x.t().contiguous().unflatten(0, (-1, 16))


def patterns(source: torch.Tensor) -> list:
    """Unsigned bit patterns in the source's own dtype, nested as [G][R][16]."""
    size = source.dtype.itemsize
    bits = source.view(torch.int32 if size == 4 else torch.int16).long() & ((1 << 8 * size) - 1)
    return bits.transpose(1, 2).tolist()


def words_of(counter: tuple, key: tuple) -> str:
    return " ".join(f"{int(word):08x}" for word in philox4x32(counter, key))


def test_known_answers():
    """Random123's three vectors, as ints and as tensors."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, words in (
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        assert words_of(counter, key) == words
        assert words_of(tuple(torch.tensor(c) for c in counter), key) == words


def test_philox_equals_the_scalar_model():
    """2000 random counters and keys; broadcast counters too."""
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (2000, 4), generator=generator)
    keys = torch.randint(0, 2**32, (20, 2), generator=generator).tolist()
    for key, part in zip(keys, counters.split(100), strict=True):
        words = torch.stack(philox4x32(part.unbind(1), tuple(key)), 1)
        assert words.tolist() == [exact_nvfp4.philox(c, tuple(key)) for c in part.tolist()]
    grid = philox4x32((torch.arange(3)[:, None], torch.arange(5), 7, 9), (1, 2))
    assert [int(w[2, 4]) for w in grid] == exact_nvfp4.philox([2, 4, 7, 9], (1, 2))


@each_dtype
def test_content_hash(dtype):
    """2·10^3 groups of every magnitude with NaN, infinities and signed zeros."""
    source = source_of(with_nonfinite(every_magnitude(128, 256, dtype)))
    expected = [
        [exact_nvfp4.content_hash(group, dtype == torch.float32) for group in row]
        for row in patterns(source)
    ]
    assert content_hash(source).tolist() == expected


@each_dtype
@pytest.mark.parametrize("origins", [(0, 0), (4096, 2**20 + 32), (2**32 - 3, 24), (5, 4 * 16 + 7)])
def test_bits_of_every_element(dtype, origins):
    """2048 elements each: key, counter and halfword by the scalar model, any origin."""
    source = source_of(every_magnitude(16, 128, dtype, seed=4))
    row_origin, contraction_origin = origins
    bits = rounding_bits(
        source, row_origin=row_origin, contraction_origin=contraction_origin, **KEY
    )
    assert bits.dtype == torch.int32 and bits.shape == source.shape
    for g, rows in enumerate(patterns(source)):
        for i, group in enumerate(rows):
            h = exact_nvfp4.content_hash(group, dtype == torch.float32)
            row = (row_origin + i) % 2**32
            expected = [
                exact_nvfp4.rounding_bits(h, row, contraction_origin + 16 * g + k, **KEY)
                for k in range(16)
            ]
            assert bits[g, :, i].tolist() == expected


def test_every_part_of_key_and_counter_matters():
    """Seed, stream, step, row, contraction index and content each give other bits."""
    source = source_of(every_magnitude(16, 32, torch.bfloat16, seed=5))
    base = {"seed": 1, "stream": 2, "step": 3, "row_origin": 4, "contraction_origin": 16}
    reference = rounding_bits(source, **base)
    assert torch.equal(rounding_bits(source.clone(), **base), reference)
    for name, value in base.items():
        other = rounding_bits(source, **(base | {name: value + 16}))
        assert (other == reference).float().mean() < 0.01, name
    changed = source.clone()
    changed[1, 7, 3] = 0.75  # one element redraws its group of 16 and nothing else
    is_equal = rounding_bits(changed, **base) == reference
    assert is_equal[1, :, 3].sum() <= 1
    is_equal[1, :, 3] = True
    assert is_equal.all()


def test_bits_are_balanced():
    """2^16 elements: each of the 16 bits is set half of the time, within 5 sigma."""
    source = source_of(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)))
    bits = rounding_bits(source, seed=0, stream=0, step=0).flatten()
    assert 0 <= bits.min() and bits.max() < 2**16
    for k in range(16):
        assert abs(((bits >> k) & 1).float().mean() - 0.5) < 5 * 0.5 / 2**8


def test_torch_generators_are_untouched():
    before = torch.random.get_rng_state()
    rounding_bits(source_of(torch.ones(16, 32)), seed=0, stream=0, step=0)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (1, 1)])
def test_empty_and_ragged_sources(shape):
    source = nvfp4.contraction_first(torch.ones(shape))
    assert rounding_bits(source, seed=0, stream=0, step=0).shape == source.shape
