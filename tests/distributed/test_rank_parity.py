"""Every module on 1, 2 and 4 ranks equals the same on one, in planes, results and over SGD steps.

One process group per rank count, the cases looped inside (rank_parity). The twelve hybrids are
listed in format_pairs. The products that take minutes run with --run-slow --run-nightly.
"""

from __future__ import annotations

import pytest

from tests.distributed.format_pairs import CHOSEN, FORMATS, NEAREST, PAIRS
from tests.distributed.launch import run_ranks
from tests.distributed.linear_parity import ROWS
from tests.distributed.rank_parity import run_sections
from tests.distributed.square_recipes import SQUARE
from tests.recipes import ALL

TIMEOUT = 900
PRODUCT = [*FORMATS, *PAIRS]
CASES = {  # per recipe
    "linear": 8,  # mode, SP, dtype
    "linear rows": 4 * len(ROWS),  # mode, told of the segments or not
    "layernorm": 8,  # four kinds, SP
    "layernorm rows": 2 * len(ROWS),
    "grouped": 4,  # mode, dtype; one of the experts has no token
}


def assert_parity(ranks: int, sections: dict[str, list[str]]) -> None:
    reports = run_ranks(run_sections, ranks, sections, timeout=TIMEOUT)
    for rank, report in enumerate(reports):
        for section, recipes in sections.items():
            found = report[section]
            assert found["cases"] == CASES[section] * len(recipes)
            errors = "\n".join(found["errors"])
            assert not errors, f"{section}, rank {rank} of {ranks}:\n{errors}"
    if ranks > 1 and "linear" in sections:
        # Were no sum ever cut differently, the limits would be vacuous.
        assert max(report["linear"]["sum_difference_fp32"] for report in reports) > 0


def test_the_hybrids_cover_every_position_and_source():
    rows, columns, sources = (set(part) for part in zip(*CHOSEN, strict=True))
    assert len(CHOSEN) == len(PAIRS) == 12 and rows == columns == set(FORMATS)
    assert sources == {"original", "rowwise_dequantized"}
    assert all(row != column for row, column, _ in CHOSEN)


@pytest.mark.parametrize("ranks", [2, 4])
def test_chosen_cases(ranks):
    assert_parity(
        ranks,
        {
            "linear": ["block|mxfp8 of rows"],
            "linear rows": ["nvfp4"],
            "layernorm": ["current"],
            "grouped": ["nvfp4|mxfp8"],
        },
    )


@pytest.mark.slow
def test_full_product_on_one_rank():
    assert_parity(1, {"linear": PRODUCT, "layernorm": PRODUCT, "grouped": PRODUCT})


@pytest.mark.slow
def test_formats_and_hybrids_on_two_ranks():
    assert_parity(
        2,
        {
            "linear": PRODUCT,
            "linear rows": ["block", "mxfp8", "nvfp4"],
            "layernorm": list(FORMATS),
            "grouped": PRODUCT,
        },
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_full_product_on_two_ranks():
    """Bug case 32: blocks end where a rank's rows do, whatever their number."""
    every = sorted({**ALL, **PAIRS})
    composite = [*PRODUCT, *NEAREST]
    assert_parity(
        2,
        {
            "linear": every,
            "linear rows": sorted({**ALL, **PAIRS, **SQUARE}),
            "layernorm": [*composite, "mxfp8_2d", "dequantized_columns"],
            "layernorm rows": [*FORMATS, *NEAREST],
            "grouped": every,
        },
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_full_product_on_four_ranks():
    """Bug case 32, with more segments."""
    assert_parity(
        4,
        {
            "linear": PRODUCT,
            "linear rows": [*FORMATS, *SQUARE],
            "layernorm": [*PRODUCT, *NEAREST],
            "layernorm rows": [*FORMATS, *NEAREST],
            "grouped": PRODUCT,
        },
    )
