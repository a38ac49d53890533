"""The picture of a run: training loss by step, with the marks it is judged by."""

from __future__ import annotations

from pathlib import Path


def save_loss_curve(
    history: list[tuple[int, float]], held_out: float, bigram: float, title: str, folder: Path
) -> Path:
    """Write loss.png into folder and return its path; needs the ``plot`` extra.

    history: (step, mean training loss since the entry before); held_out, bigram: nats per byte.
    """
    import matplotlib  # an optional extra, so imported only when a plot is asked for

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*history, strict=True), label="training")
    axes.axhline(bigram, color="grey", linestyle=":", label=f"bigram entropy {bigram:.2f}")
    axes.axhline(held_out, color="C1", linestyle="--", label=f"held-out, at the end {held_out:.2f}")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
