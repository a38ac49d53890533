"""How many collectives ran and what they moved: counted where they are called, reported on demand.

Bytes are those that this rank receives, as a ring moves them, for n ranks: (n − 1) · piece for an
all-gather or a reduce-scatter of pieces, 2 · (n − 1) / n · tensor for an all-reduce.
"""

from __future__ import annotations

import dataclasses

KINDS = {
    "gather rows": "all-gather of high-precision rows",
    "gather planes": "all-gather of codes and scales",
    "scatter sum": "reduce-scatter of partial products",
    "sum": "all-reduce of partial products or gradients",
    "max": "all-reduce of amaxes",
    "agreement": "comparison of recipes or slots between ranks",
}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: of which module, what they carried, how many, bytes received.

    module: its name, "" for an unnamed one or none; what: such as "input for fprop", or "".
    """

    module: str
    kind: str
    what: str
    collectives: int
    nbytes: int


_counts: dict[tuple[str, str, str], list[int]] = {}


def count(kind: str, module: str, what: str, nbytes: int) -> None:
    """One more collective."""
    assert kind in KINDS
    entry = _counts.setdefault((module, kind, what), [0, 0])
    entry[0] += 1
    entry[1] += nbytes


def counted() -> tuple[Traffic, ...]:
    """Everything since ``forget``, in the order in which each entry was first counted."""
    return tuple(Traffic(*key, *entry) for key, entry in _counts.items())


def forget() -> None:
    """Count from zero."""
    _counts.clear()
