"""The command line of train_gpt.py, and everything about it that can be refused before a run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from pathlib import Path

import torch

import dist_finegrain as dfg
from dist_finegrain.planning import load_object
from examples.gpt_model import GPTConfig
from examples.text_corpus import Corpus, load_corpus

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_parser() -> argparse.ArgumentParser:
    """The command line; defaults are the quick start's run."""
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a byte-level GPT on real text, each GEMM in the format a recipe picks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    recipe = parser.add_argument_group("recipe and parallelism")
    recipe.add_argument(
        "--recipe",
        default="examples.recipes:guide_factory",
        help="package.module:attribute of a factory or CustomRecipe, or bf16 for none",
    )
    recipe.add_argument("--tp", type=int, help="tensor-parallel ranks; default: all ranks")
    recipe.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True)
    recipe.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    recipe.add_argument("--dtype", choices=DTYPES, default="bf16", help="compute dtype")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--hidden", type=int, default=128)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument(
        "--moe",
        type=int,
        nargs="?",
        const=4,
        default=0,
        metavar="EXPERTS",
        help="every MLP is a mixture of experts, 4 where no number is given; 0: dense MLPs",
    )
    model.add_argument("--top-k", type=int, help="experts of a token, with --moe 2 by default")
    training = parser.add_argument_group("training")
    training.add_argument("--data", help="text file or folder; default: Python's own sources")
    training.add_argument("--steps", type=int, default=800)
    training.add_argument("--seq-len", type=int, default=128)
    training.add_argument("--batch", type=int, default=4, help="sequences per data-parallel rank")
    training.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    training.add_argument("--seed", type=int, default=0)
    report = parser.add_argument_group("report")
    report.add_argument("--log-interval", type=int, default=20, help="steps between lines")
    report.add_argument("--out", type=Path, help="folder for metrics.jsonl and loss.png")
    report.add_argument("--plot", action="store_true", help="draw the loss curve; needs --out")
    report.add_argument(
        "--check-gradients",
        action="store_true",
        help="compare quantized with high-precision gradients at the first and the last step",
    )
    return parser


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked command line: everything that can be refused has been."""

    options: argparse.Namespace
    model: GPTConfig
    recipe: dfg.CustomRecipe | None
    corpus: Corpus

    @classmethod
    def create(cls, options: argparse.Namespace, world: int) -> Job:
        """Raises ValueError, before any process group or launch, naming what to change."""
        tp = world if options.tp is None else options.tp
        if tp < 1 or world % tp:
            raise ValueError(
                f"tp={tp} with {world} ranks; accepted: a divisor of the number of ranks, "
                f"e.g. tp={world}"
            )
        for name in ("steps", "batch", "log_interval"):
            if getattr(options, name) < 1:
                raise ValueError(
                    f"{name}={getattr(options, name)}; accepted: a positive integer, e.g. {name}=8"
                )
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda, but torch sees no GPU; accepted: device=cpu")
        if options.plot and options.out is None:
            raise ValueError("plot without out; accepted: a folder for the picture, e.g. out=runs")
        if options.plot and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(
                "plot needs matplotlib, which is not installed; accepted: no plot, or "
                "pip install 'dist_finegrain[plot]'"
            )
        if options.top_k is not None and not options.moe:
            raise ValueError(
                f"top_k={options.top_k} without moe; accepted: both, e.g. moe=4 with top_k=2"
            )
        model = GPTConfig(
            layers=options.layers,
            hidden=options.hidden,
            heads=options.heads,
            seq_len=options.seq_len,
            tp=tp,
            sequence_parallel=options.sequence_parallel and tp > 1,
            seed=options.seed,
            experts=options.moe,
            top_k=2 if options.top_k is None else options.top_k,
        )
        corpus = load_corpus(options.data)
        shortest = min(len(corpus.train), len(corpus.held_out))
        if shortest <= options.seq_len + 1:
            raise ValueError(
                f"seq_len={options.seq_len} with {shortest} bytes of text held out; accepted: less "
                f"than that, e.g. seq_len={max(tp, shortest // 2 // tp * tp)}, or more data"
            )
        return cls(options, model, load_recipe(options.recipe), corpus)


def load_recipe(path: str) -> dfg.CustomRecipe | None:
    """The recipe at an import path: a CustomRecipe or a factory; None for "bf16"."""
    if path == "bf16":
        return None
    found = load_object(path, "recipe")
    return found if isinstance(found, dfg.CustomRecipe) else dfg.CustomRecipe(qfactory=found)
