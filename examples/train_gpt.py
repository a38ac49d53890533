"""Trains a byte-level GPT on real text under torchrun, each GEMM in the format a recipe picks.

    torchrun --nproc-per-node=2 examples/train_gpt.py --tp 2 --recipe examples.recipes:guide_factory

Prints the recipe's plan, the corpus' entropies, a line per interval and the held-out loss. With
``--out`` all of it is also written as JSON lines, and with ``--plot`` as a picture.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if not __package__:  # run as a file: make the examples package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dist_finegrain as dfg
from dist_finegrain.ops.gemm import gemm_counts, reset_gemm_counts
from dist_finegrain.planning import Plan
from examples.execution import choose_execution
from examples.gpt_model import GPT
from examples.job import DTYPES, Job, build_parser
from examples.loss_curve import save_loss_curve
from examples.moe_layer import MoELayer, experts_need_host_splits
from examples.parallel import (
    Ranks,
    backward,
    clip_gradients,
    compare_gradients,
    held_out_loss,
    mean_loss,
    precision,
    reduce_gradients,
)
from examples.text_corpus import (
    bigram_entropy,
    sample_batch,
    spread_windows,
    unigram_entropy,
)

log = logging.getLogger("train_gpt")

HELD_OUT_BATCHES = 64
MAX_GRADIENT_NORM = 1.0


class Metrics:
    """metrics.jsonl of rank 0; without a folder, or on other ranks, records go nowhere."""

    def __init__(self, folder: Path | None, rank: int):
        self._file = None
        if folder is not None and rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / "metrics.jsonl").open("w")

    def write(self, event: str, **values: Any) -> None:
        """Append {"event": event, **values} as one line, at once."""
        if self._file is not None:
            print(json.dumps({"event": event, **values}), file=self._file, flush=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 5 % of the steps, then a cosine down to 5 % of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: GPT) -> torch.optim.AdamW:
    """AdamW on FP32 parameters; norms and biases do not decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def gemms_by_format(counts: collections.Counter) -> dict[str, int]:
    """gemm_counts() with JSON keys: "gemm | format A | format B"."""
    return {" | ".join(key): count for key, count in sorted(counts.items())}


class Trainer:
    """One rank's run of a job."""

    def __init__(self, job: Job, ranks: Ranks, device: torch.device):
        self.job, self.ranks, self.device = job, ranks, device
        self.model = GPT(job.model, ranks.tp_group).to(device)
        self.optimizer = make_optimizer(self.model)
        self.metrics = Metrics(job.options.out, ranks.rank)
        self.history: list[tuple[int, float]] = []
        dtype = DTYPES[job.options.dtype]
        self.quantized = functools.partial(precision, job.recipe, device.type, dtype)
        self.high_precision = functools.partial(precision, None, device.type, dtype)
        # Tensor-parallel ranks draw the same batches, data-parallel ranks different ones.
        self.generator = torch.Generator().manual_seed(job.options.seed * 1000 + ranks.dp_rank)

    @property
    def tokens_per_step(self) -> int:
        """Per data-parallel rank."""
        return self.job.options.batch * self.job.options.seq_len

    def describe(self) -> None:
        """Print and record what is about to run; raises ValueError if the plan has rejections."""
        options, ranks, corpus = self.job.options, self.ranks, self.job.corpus
        size = sum(p.numel() for p in self.model.parameters())
        log.info(
            "ranks: %d on %s, tp %d (sequence parallel %s), dp %d; %d parameters on this rank",
            ranks.world,
            options.device,
            ranks.tp,
            "on" if self.job.model.sequence_parallel else "off",
            ranks.dp,
            size,
        )
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
        self.metrics.write("config", **settings, world=ranks.world, dp=ranks.dp)
        if self.job.recipe is None:
            log.info("no recipe: every GEMM runs in %s", options.dtype)
        else:
            plan = dfg.plan(
                self.model, self.job.recipe, device=self.device, tokens=self.tokens_per_step
            )
            log.info("%s\n", plan)
            self.metrics.write("plan", rows=[dataclasses.asdict(row) for row in plan.rows])
            if not plan.ok:
                row = next(row for row in plan.rows if row.bucket == "rejected")
                raise ValueError(f"{row.module} {row.gemm}: {row.reason}")
            self.read_splits_where_needed(plan)
        unigram, self.bigram = unigram_entropy(corpus.train), bigram_entropy(corpus.train)
        log.info(
            "corpus: %s, %.1f MB to train on, %.1f MB held out; entropy in nats/byte: "
            "unigram %.3f, bigram %.3f",
            corpus.source,
            len(corpus.train) / 1e6,
            len(corpus.held_out) / 1e6,
            unigram,
            self.bigram,
        )
        self.metrics.write(
            "corpus",
            source=corpus.source,
            train_bytes=len(corpus.train),
            held_out_bytes=len(corpus.held_out),
            unigram=unigram,
            bigram=self.bigram,
        )

    def read_splits_where_needed(self, plan: Plan) -> None:
        """Let experts whose formats need it read their token counts on the host; says so."""
        reason = experts_need_host_splits(plan)
        if not reason:
            return
        log.info("token counts of experts are read on the host each step: %s", reason)
        for module in self.model.modules():
            if isinstance(module, MoELayer):
                module.read_splits = True

    def run(self) -> float:
        """Train, report, and return the held-out loss in nats per byte."""
        options = self.job.options
        counts: collections.Counter = collections.Counter()
        running, start = torch.zeros((), device=self.device), time.perf_counter()
        last_step, last_time = 0, start
        for step in range(1, options.steps + 1):
            batch = self._batch()
            if options.check_gradients and step in (1, options.steps):
                self._check_gradients(step, batch)
            reset_gemm_counts()
            running += backward(self.model, batch, self.quantized)
            counts += gemm_counts()
            reduce_gradients(self.model, self.ranks)
            norm = clip_gradients(self.model, self.ranks, MAX_GRADIENT_NORM)
            rate = learning_rate(step - 1, options.steps, options.lr)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step % options.log_interval == 0 or step == options.steps:
                tokens, now = (step - last_step) * self.tokens_per_step, time.perf_counter()
                loss = mean_loss(running, tokens, self.model, self.ranks)
                speed = tokens * self.ranks.dp / (now - last_time)
                remaining = (now - start) / step * (options.steps - step)
                self._log_step(step, loss, rate, norm.item(), speed, remaining)
                running.zero_()
                last_step, last_time = step, now
        self.metrics.write("gemms", counts=gemms_by_format(counts), steps=options.steps)
        return self._finish(time.perf_counter() - start)

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        options = self.job.options
        batch = sample_batch(self.job.corpus.train, options.batch, options.seq_len, self.generator)
        return batch[0].to(self.device), batch[1].to(self.device)

    def _log_step(self, step, loss, rate, norm, speed, remaining) -> None:
        steps = self.job.options.steps
        log.info(
            "step %*d/%d  %3d %%  loss %.4f  lr %.1e  |g| %.2f  %6.0f tokens/s  %s left",
            len(str(steps)),
            step,
            steps,
            100 * step // steps,
            loss,
            rate,
            norm,
            speed,
            _duration(remaining),
        )
        self.metrics.write(
            "step", step=step, loss=loss, lr=rate, grad_norm=norm, tokens_per_second=speed
        )
        self.history.append((step, loss))
        if not math.isfinite(loss):
            raise RuntimeError(f"loss is {loss} at step {step}; e.g. a smaller --lr")

    def _check_gradients(self, step: int, batch) -> None:
        rows = compare_gradients(self.model, self.ranks, batch, self.high_precision, self.quantized)
        log.info("gradients at step %d against high precision: cosine, norm ratio", step)
        for row in rows:
            log.info("  %-34s %.4f  %.3f", row.parameter, row.cosine, row.norm_ratio)
        self.metrics.write("gradients", step=step, rows=[dataclasses.asdict(r) for r in rows])

    def _finish(self, seconds: float) -> float:
        options = self.job.options
        batches = spread_windows(
            self.job.corpus.held_out, options.batch, options.seq_len, HELD_OUT_BATCHES
        )
        on_device = ((x.to(self.device), y.to(self.device)) for x, y in batches)
        loss = held_out_loss(self.model, self.ranks, on_device, self.quantized)
        log.info("held-out loss %.4f nats/byte; trained for %s", loss, _duration(seconds))
        self.metrics.write("held_out", loss=loss, seconds=seconds)
        if options.plot and self.ranks.rank == 0:
            title = f"{options.recipe}, {options.dtype}, tp {self.ranks.tp}, dp {self.ranks.dp}"
            path = save_loss_curve(self.history, loss, self.bigram, title, options.out)
            log.info("loss curve: %s", path)
        return loss


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d} min"


def local_device(device_type: str) -> torch.device:
    """The CPU, or this rank's GPU, made current."""
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def main(argv: list[str] | None = None) -> int:
    """Run on this rank; the exit code: 2 for a mistake in the command line or the recipe."""
    parser = build_parser()
    options = parser.parse_args(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    for logger in (log, logging.getLogger(dfg.__name__)):
        logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    try:
        job = Job.create(options, world)
        log.info("%s", choose_execution(options.device))
        device = local_device(options.device)
        ranks = Ranks()
        if world > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            ranks = Ranks.create(job.model.tp, device.type)
        trainer = Trainer(job, ranks, device)
        trainer.describe()
    except (TypeError, ValueError) as error:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # once per machine: files may differ
            print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    trainer.run()
    if world > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
