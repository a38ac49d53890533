"""How far quantized gradients may be from high-precision ones, for the tests of the job."""

import statistics

from examples.recipe_table import LINEAR_WEIGHT


def check_agreement(rows, has_nvfp4: bool) -> None:
    """The limits that a format's gradient is held to against high precision.

    A router's gradient is made of differences between the results of experts, which are small
    beside the errors of four-bit results: it has limits of its own under NVFP4.
    """
    routers = [r for r in rows if r.parameter.endswith("router.weight")] if has_nvfp4 else []
    weights = [r for r in rows if LINEAR_WEIGHT.search(r.parameter)]
    others = [r for r in rows if r not in weights and r not in routers]
    assert len(weights) >= 4 and others
    cosines = [r.cosine for r in weights]
    weight_limit, other_limit, norm_limit = (0.90, 0.85, 0.20) if has_nvfp4 else (0.99, 0.98, 0.07)
    assert min(cosines) >= weight_limit, sorted(weights, key=lambda r: r.cosine)[:3]
    if has_nvfp4:
        assert statistics.median(cosines) >= 0.93
    assert min(r.cosine for r in others) >= other_limit, sorted(others, key=lambda r: r.cosine)[:3]
    for row in weights + others:
        assert abs(row.norm_ratio - 1) <= norm_limit, row
    for row in routers:
        assert row.cosine >= 0.80 and abs(row.norm_ratio - 1) <= 0.60, row
