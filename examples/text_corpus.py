"""Real text as bytes: the sources of Python's standard library by default, or the user's files.

Entropies are in nats per byte: the unigram and bigram figures are what a model reaches that knows
only byte frequencies, or only the byte before.
"""

from __future__ import annotations

import dataclasses
import os
import sysconfig
from pathlib import Path

import torch

# Test data, generated tables and installed packages are not prose-like source text.
_SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_MAX_FILE_BYTES = 128 << 10
_HELD_OUT_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, both uint8 [n]; ``source`` says where they are from."""

    train: torch.Tensor
    held_out: torch.Tensor
    source: str


def load_corpus(path: str | os.PathLike | None = None, *, max_bytes: int = 8 << 20) -> Corpus:
    """Read text and hold out every tenth piece of it.

    path: a file, a folder (its text files, hidden ones left out, sorted by path) or None for the
    sources of Python's standard library.
    The pieces are the files; fewer than twenty are joined and cut into 100 equal pieces. Reading
    stops at max_bytes.

    Raises ValueError when there is nothing to read, naming the path.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files, source = _standard_library(root), "the Python standard library"
    else:
        root, source = Path(path), str(path)
        files = _visible_files(root) if root.is_dir() else [root]
    pieces = _read(files, max_bytes, source)
    if len(pieces) < 2 * _HELD_OUT_EVERY:
        text = b"".join(pieces)
        size = max(1, -(-len(text) // 100))
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
    # The same files are held out whatever the cap, as long as they are read at all.
    held_out = b"".join(pieces[_HELD_OUT_EVERY // 2 :: _HELD_OUT_EVERY])
    train = b"".join(p for i, p in enumerate(pieces) if i % _HELD_OUT_EVERY != _HELD_OUT_EVERY // 2)
    if not train or not held_out:
        raise ValueError(
            f"data={source!r} has too little text ({len(train) + len(held_out)} bytes); "
            "accepted: a text file or a folder of text, e.g. data=None for Python's own sources"
        )
    return Corpus(_tensor(train), _tensor(held_out), source)


def _visible_files(root: Path) -> list[Path]:
    def is_visible(path: Path) -> bool:
        return not any(part.startswith(".") for part in path.relative_to(root).parts)

    return sorted(path for path in root.rglob("*") if path.is_file() and is_visible(path))


def _standard_library(root: Path) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(f for f in files if f.stat().st_size <= _MAX_FILE_BYTES)


def _read(files: list[Path], max_bytes: int, source: str) -> list[bytes]:
    pieces, total = [], 0
    for file in files:
        try:
            piece = file.read_bytes()[: max_bytes - total]
        except OSError as error:
            raise ValueError(f"data={source!r} cannot be read: {error}") from error
        if not piece or b"\0" in piece[:1024]:
            continue  # empty, or binary
        pieces.append(piece)
        total += len(piece)
        if total >= max_bytes:
            break
    return pieces


def _tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def unigram_entropy(text: torch.Tensor) -> float:
    """Entropy of one byte, nats; text uint8 [n]."""
    return _entropy(torch.bincount(text.long(), minlength=256))


def bigram_entropy(text: torch.Tensor) -> float:
    """Entropy of a byte given the byte before it, nats; text uint8 [n], n ≥ 2."""
    pairs = torch.bincount(text[:-1].long() * 256 + text[1:].long(), minlength=256 * 256)
    return _entropy(pairs) - _entropy(pairs.view(256, 256).sum(1))


def _entropy(counts: torch.Tensor) -> float:
    p = counts[counts > 0].double() / counts.sum()
    return float(-(p * p.log()).sum())


def sample_batch(
    text: torch.Tensor, batch: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of text uint8 [n]: inputs and next bytes, both int64 [length, batch]."""
    starts = torch.randint(len(text) - length, (batch,), generator=generator)
    windows = torch.stack([text[s : s + length + 1] for s in starts.tolist()], dim=1).long()
    return windows[:-1], windows[1:]


def spread_windows(
    text: torch.Tensor, batch: int, length: int, batches: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Evenly spaced windows over the whole text, in ``sample_batch``'s form: for evaluation."""
    last = len(text) - length - 1
    starts = torch.linspace(0, last, batches * batch, dtype=torch.float64).long().tolist()
    windows = [text[s : s + length + 1].long() for s in starts]
    result = []
    for i in range(0, len(windows), batch):
        stacked = torch.stack(windows[i : i + batch], dim=1)
        result.append((stacked[:-1], stacked[1:]))
    return result
