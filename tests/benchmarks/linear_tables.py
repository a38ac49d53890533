"""The markdown tables of the Linear benchmark, and which of their lines miss a bar."""

from __future__ import annotations

from collections.abc import Sequence


def goal(line: dict) -> float | None:
    """The speed-up to reach: Transformer Engine's of this process, else the bar's upper end."""
    of_te = [found["speed_up"] for found in line.get("te", {}).values() if "speed_up" in found]
    return max(of_te) if of_te else (line.get("bar") or [None])[-1]


def number(value: float | None, spec: str, is_missed: bool = False) -> str:
    """A cell: "–" where there is no number, bold where a bar is missed."""
    text = "–" if value is None else format(value, spec)
    return f"**{text}**" if is_missed else text


def table(head: Sequence[str], rows: list[list[str]]) -> str:
    """Markdown; a row may be short."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


LINEAR_HEAD = (
    *("Recipe", "eager ms", "× BF16", "bar", "TE ×", "floor ×", "of floor"),
    *("graph ms", "graph ×", "graph of floor", "saved ×", "peak ×", "TE peak ×", "error"),
)


def linear_row(line: dict) -> list[str]:
    """One recipe of one shape."""
    if "error_text" in line:
        return [line["name"], line["error_text"]]
    eager, graph, of_te = line["eager"], line.get("graph", {}), line.get("te", {})
    if "error_text" in eager:
        return [line["name"], eager["error_text"]]
    reached = goal(line)
    bar = "–".join(format(value, ".2f") for value in sorted(set(line.get("bar") or ()))) or "–"
    te_cells = {
        key: ", ".join(
            f"{format(found[key], '.2f')} {kind}" for kind, found in of_te.items() if key in found
        )
        for key in ("speed_up", "peak_ratio")
    }
    return [
        line["name"],
        number(eager["ms"], ".3f"),
        number(eager["speed_up"], ".2f", reached is not None and eager["speed_up"] < reached),
        bar,
        te_cells["speed_up"] or "–",
        number(eager.get("floor_speed_up"), ".2f"),
        number(eager.get("of_floor"), ".2f"),
        number(graph.get("ms"), ".3f"),
        number(graph.get("speed_up"), ".2f"),
        number(graph.get("of_floor"), ".2f"),
        number(line.get("saved_ratio"), ".2f"),
        number(line.get("peak_ratio"), ".2f"),
        te_cells["peak_ratio"] or "–",
        number(line.get("error"), ".1e"),
    ]


def notes(lines: list[dict]) -> list[str]:
    """Kernels of each line, and why a graph or a column of Transformer Engine is missing."""
    found = []
    for line in lines:
        name = line["name"]
        if "kernels" in line:
            found.append(f"- {name}: {line['kernels']}")
        if text := line.get("graph", {}).get("error_text"):
            found.append(f"- {name}, no graph: {text}")
        of_te = line.get("te", {}).items()
        found += [f"- TE {name}, {k}: {v['error_text']}" for k, v in of_te if "error_text" in v]
    return found


def markdown(report: dict) -> str:
    """Every part that was run as a table."""
    sections = [
        f"{report['device']}, torch {report['torch']}, "
        f"Transformer Engine: {report['transformer_engine']}"
    ]
    for shape in dict.fromkeys(tuple(line["shape"]) for line in report["linear"]):
        lines = [line for line in report["linear"] if tuple(line["shape"]) == shape]
        m, k, n = shape
        sections += [f"Linear forward + backward, {m}×{k}→{n}"]
        sections += [table(LINEAR_HEAD, [linear_row(line) for line in lines])]
        sections += ["\n".join(notes(lines))]
    if report["host"]:
        m, k, n = report["tiny"]
        rows = [
            [
                line["name"],
                line.get("error_text") or number(line["ms"], ".3f", is_late(line)),
                number(line.get("bar_ms"), ".2f"),
                number(line.get("over_bf16"), ".2f"),
            ]
            for line in report["host"]
        ]
        sections += [f"Host time, Linear forward + backward, {m}×{k}→{n}"]
        sections += [table(("Recipe", "ms", "bar", "of BF16's"), rows)]
    if report["gemm"]:
        rows = [
            [
                line["name"],
                line["backend"],
                line.get("error_text") or number(line["tflop_s"], ".1f"),
                number(line.get("ratio"), ".2f"),
                number(line.get("error"), ".1e"),
            ]
            for line in report["gemm"]
        ]
        sections += [f"GEMM, {report['gemm_size']}³"]
        sections += [table(("Operands", "Backend", "TFLOP/s", "× BF16", "error"), rows)]
    return "\n\n".join(section for section in sections if section)


def is_late(line: dict) -> bool:
    """Whether a line of the host table misses its bar."""
    return line.get("bar_ms") is not None and line["ms"] > line["bar_ms"]


def has_failed(line: dict) -> bool:
    """Whether one of this package's lines has no time; Transformer Engine's own do not count."""
    is_te = line["name"].startswith("TE ")
    return not is_te and ("error_text" in line or "error_text" in line.get("eager", {}))
