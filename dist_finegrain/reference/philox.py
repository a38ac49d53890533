"""Philox4x32-10 and the 16 random bits that stochastic rounding draws for each element.

    key     = (seed, stream)
    counter = (j >> 3, i, step, h)      i plane row, j contraction index, both global
    r       = (word[(j >> 1) & 3] >> 16·(j & 1)) & FFFF
    h       = Σ_k p_k · P_k mod 2^32    over the 16 elements of the plane row's group of 16:
                                        p_k bit pattern, P_k = 9E3779B1^(k+1) mod 2^32

The counter holds the content h instead of a call count: recomputation draws the same bits, other
microbatches draw others, and no state is kept. torch's generators are not involved.

Legend: R rows of the plane, G groups of 16 along its contraction. Tensors are contraction-first,
[G, 16, R], so that each pass over a group's elements reads contiguous memory.
"""

from __future__ import annotations

import torch

GROUP = 16
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_HASH_BASE = 0x9E3779B1
_ROUNDS = 10

Word = int | torch.Tensor


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[int, int]
) -> tuple[Word, Word, Word, Word]:
    """The four 32-bit words of a counter, as int64 in [0, 2^32); tensors broadcast.

    counter: ints or int64 tensors in [0, 2^32); key: two ints in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products wrap in int64. Their low words are left unmasked in c1 and c3, which are only
        # combined by xor; c0 and c2, which are multiplied, must be in [0, 2^32).
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) ^ c1 ^ k0) & _MASK, p1
        c2, c3 = ((p0 >> 32) ^ c3 ^ k1) & _MASK, p0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def content_hash(source: torch.Tensor) -> torch.Tensor:
    """h of each group: int64 [G, R] in [0, 2^32).

    source: FP32, FP16 or BF16 [G, 16, R]; its bit patterns are hashed (NaN payloads included).
    """
    if source.dtype == torch.float32:
        bits = source.view(torch.int32)
        bits = (bits << 1) | ((bits >> 31) & 1)
    else:
        bits = source.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    factors = [pow(_HASH_BASE, k + 1, 1 << 32) for k in range(GROUP)]
    factors = torch.tensor(factors, device=source.device).to(torch.int32)  # int32 wraps like uint32
    return (bits * factors[:, None]).sum(1, dtype=torch.int32).to(torch.int64) & _MASK


def rounding_bits(
    source: torch.Tensor,
    *,
    seed: int,
    stream: int,
    step: int,
    row_origin: int = 0,
    contraction_origin: int = 0,
) -> torch.Tensor:
    """r of each element: int32 [G, 16, R] in [0, 2^16).

    source: [G, 16, R], what the plane is made from, before any transform; zero where the matrix
    ends. row_origin, contraction_origin: global index of the first row and contraction element;
    groups are cut from the plane's own start, wherever that lies.
    """
    groups, _, rows = source.shape
    device = source.device
    offset = contraction_origin & 7
    counters = 3 if offset else 2  # of 8 elements each, that cover a group
    i = (torch.arange(rows, device=device) + row_origin) & _MASK
    j = torch.arange(groups, device=device)[:, None] * GROUP + contraction_origin
    j8 = ((j >> 3) + torch.arange(counters, device=device)) & _MASK  # [G, counters]
    words = philox4x32(
        (j8[:, :, None], i, step & _MASK, content_hash(source)[:, None]),
        (seed & _MASK, stream & _MASK),
    )
    bits = torch.empty((groups, counters, 8, rows), dtype=torch.int32, device=device)
    for index, word in enumerate(words):
        bits[:, :, 2 * index] = word & 0xFFFF
        bits[:, :, 2 * index + 1] = word >> 16
    return bits.flatten(1, 2)[:, offset : offset + GROUP]
