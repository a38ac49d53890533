"""comm_report(): what this process's modules sent to other ranks, by kind and module."""

from __future__ import annotations

import dataclasses

from . import stepping
from .distributed import traffic
from .distributed.traffic import KINDS, Traffic

_first_step = 0


@dataclasses.dataclass(frozen=True)
class CommReport:
    """Collectives since the last reset; ``str()`` is a table of what one step needs.

    steps: training steps that ended since; rows: by module, kind and what was carried, totals.
    """

    steps: int
    rows: tuple[Traffic, ...]

    def select(self, kind: str = "", module: str = "", what: str = "") -> CommReport:
        """Only the rows of this kind, module and content; "" means any.

        Raises ValueError for a kind that does not exist.
        """
        if kind and kind not in KINDS:
            raise ValueError(f"kind={kind!r}; accepted: {', '.join(KINDS)}, e.g. kind='sum'")
        wanted = {"kind": kind, "module": module, "what": what}
        rows = (r for r in self.rows if all(v in ("", getattr(r, k)) for k, v in wanted.items()))
        return CommReport(self.steps, tuple(rows))

    @property
    def collectives(self) -> int:
        """Number of collectives of all rows."""
        return sum(row.collectives for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank received in all rows."""
        return sum(row.nbytes for row in self.rows)

    def __str__(self) -> str:
        per, unit = max(self.steps, 1), "step" if self.steps else "run, no step ended"
        table = [("module", "kind", "what", f"collectives per {unit}", "bytes received")]
        rows = [*self.rows, Traffic("total", "", "", self.collectives, self.nbytes)]
        for row in rows:
            numbers = (f"{row.collectives / per:.6g}", f"{row.nbytes / per:.0f}")
            table.append((row.module or "–", row.kind or "–", row.what or "–", *numbers))
        widths = [max(len(line[i]) for line in table) for i in range(5)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(t, widths, strict=True)) for t in table)
        return "\n".join(line.rstrip() for line in lines)


def comm_report(*, reset: bool = False) -> CommReport:
    """Number and bytes of the collectives that the package ran since the last reset.

    Counted on every rank for itself, also in high precision; what a trainer reduces on its own is
    not. reset: count from zero afterwards, as for one step: ``comm_report(reset=True)`` before it,
    ``comm_report()`` after. Nothing is communicated.
    """
    global _first_step
    report = CommReport(stepping.completed_steps() - _first_step, traffic.counted())
    if reset:
        traffic.forget()
        _first_step = stepping.completed_steps()
    return report
