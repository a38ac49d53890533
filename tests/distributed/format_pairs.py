"""The seven plain formats and twelve hybrids of them, chosen so that no position goes untried."""

from __future__ import annotations

import functools

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.distributed.square_recipes import SQUARE
from tests.recipes import ALL, PLAIN

FORMATS = ("identity", "delayed", "current", "row", "block", "mxfp8", "nvfp4")
# (row, column, columnwise_source): each format in both positions, each source with most of them.
# No "row" under "rowwise_dequantized": its scales are local where the contraction is sharded, so
# what a column decodes is not one rank's, by design.
CHOSEN = (
    ("identity", "current", "original"),
    ("current", "delayed", "rowwise_dequantized"),
    ("delayed", "row", "original"),
    ("row", "block", "original"),
    ("block", "mxfp8", "rowwise_dequantized"),
    ("mxfp8", "nvfp4", "rowwise_dequantized"),
    ("nvfp4", "identity", "rowwise_dequantized"),
    ("current", "nvfp4", "rowwise_dequantized"),  # reads an amax twice
    ("nvfp4", "mxfp8", "original"),
    ("mxfp8", "row", "rowwise_dequantized"),
    ("block", "current", "original"),
    ("delayed", "block", "rowwise_dequantized"),
)


def pair_factory(role, *, row: str, column: str, source: str):
    """fprop reads ``row``, dgrad and wgrad ``column``: hybrids of X and W, one format of dY."""
    if role is None:
        return dfg.IdentityQuantizer()
    if role.tensor_type == "grad_output":
        return PLAIN[column](role)
    return dfg.HybridQuantizer(
        rowwise_quantizer=PLAIN[row](role),
        columnwise_quantizer=PLAIN[column](role),
        columnwise_source=source,
    )


PAIRS = {
    f"{row}|{column}{'' if source == 'original' else ' of rows'}": functools.partial(
        pair_factory, row=row, column=column, source=source
    )
    for row, column, source in CHOSEN
}


# Stochastic noise depends on content, so what two layers make of it parts with the last bit.
NEAREST = {
    "nvfp4_nearest": functools.partial(factories.nvfp4_factory, disable_stochastic_rounding=True)
}


def formats_of(recipe: str) -> tuple[str, str]:
    """The plain formats that fprop, and the two other GEMMs, read under a recipe of this file."""
    row, _, column = recipe.removesuffix(" of rows").partition("|")
    return row, column or row


def factory_of(recipe: str):
    """The factory that a test of ranks calls by this name."""
    return {**ALL, **SQUARE, **PAIRS, **NEAREST}[recipe]
