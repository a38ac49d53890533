"""A grouped linear layer in every format: its planes, their single twins, stand-ins for CUDA.

Legend: E experts with m tokens each, M together; X [M, K], dY [M, N], weights W [E, N, K].
"""

from __future__ import annotations

import dataclasses

import torch

from dist_finegrain.formats.fused_grouped import Grouped, cast_grouped, measure_grouped
from dist_finegrain.formats.identity import IdentityFormat
from dist_finegrain.formats.plane import Format, Plane
from dist_finegrain.ops.experts import Experts
from dist_finegrain.ops.grouped import grouped_gemm
from tests.formats.fused_cases import EVERY, SCALE

GEMMS = ("fprop", "dgrad", "wgrad")
IDENTITY = IdentityFormat()
_NAMES = (
    "delayed", "current", "row", "current_e5m2", "row_e5m2_pow2", "block", "block_fp32", "block_2d",
    "block_e5m2_epsilon", "mxfp8", "mxfp8_e5m2", "mxfp8_2d", "nvfp4", "nvfp4_2d", "nvfp4_rht",
    "nvfp4_sr", "nvfp4_row",
)  # fmt: skip
FORMATS = {"identity": IDENTITY} | {name: EVERY[name] for name in _NAMES}
NATIVE = ("delayed", "current", "row")
SPLITS = {
    "zeros_anywhere": [0, 5, 0, 0, 130, 16, 0],
    "zero_last": [16, 16, 32, 0],
    "zero_first": [0, 16, 16, 32],
    "only_one": [0, 0, 64, 0],
    "nothing": [0, 0, 0, 0],
    "single_rows": [1, 1, 1, 1],
    "ragged_mxfp8": [33, 31, 0, 64],
    "ragged_block": [100, 28, 128],
    "ragged_current": [5, 11, 16],
    "alone": [37],
}


def runs(gemm: str, a: Format, b: Format) -> bool:
    """Whether the pair is one that experts multiply at all."""
    grouped = (a, b) if gemm == "wgrad" else (a,)
    is_square = any(f.family == "float8_block" and f.two_dimensional for f in grouped)
    is_forward_only = any(getattr(f, "row_scaled", False) for f in (a, b)) and gemm != "fprop"
    return a.family == b.family and a.rht == b.rht and not is_square and not is_forward_only


def pairs(gemm: str) -> list[tuple[str, str]]:
    return [(a, b) for a in FORMATS for b in FORMATS if runs(gemm, FORMATS[a], FORMATS[b])]


def ends_of(split: list[int], device: str) -> torch.Tensor:
    return torch.tensor(split, device=device).cumsum(0).to(torch.int32)


def encoded(x: torch.Tensor, format: Format) -> Plane:
    """The plane of one expert's matrix, as the format itself makes it."""
    statistic = torch.tensor([SCALE]) if format.statistic == "scale" else None
    return format.encode(x, statistic)


def grouped(x: torch.Tensor, ends: torch.Tensor, row, column) -> Grouped:
    """Both planes of consecutive experts, with statistics of their own."""
    statistics = list(measure_grouped(x, ends, row, column))
    for side, format in enumerate((row, column)):
        if format is not None and format.statistic == "scale":
            statistics[side] = torch.full((len(ends),), SCALE, device=x.device)
    return cast_grouped(
        x, ends, row, column, row_statistic=statistics[0], column_statistic=statistics[1]
    )


@dataclasses.dataclass
class Layer:
    """Random operands; ``planes`` and ``singles`` make what a GEMM reads."""

    split: list[int]
    n: int
    k: int
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self):
        generator = torch.Generator().manual_seed(sum(self.split) + 7 * self.n + self.k)
        rows, experts = sum(self.split), len(self.split)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(self.dtype).to(self.device)

        self.x, self.dy = normal(rows, self.k), normal(rows, self.n)
        self.w = normal(experts, self.n, self.k)
        self.ends = ends_of(self.split, self.device)

    def planes(self, gemm: str, a: Format, b: Format):
        """(a, b, column_ends) as ``grouped_gemm`` takes them, from one cast of each matrix."""
        experts = len(self.split)
        if gemm == "wgrad":
            dy = grouped(self.dy, self.ends, None, a)
            return dy.column, grouped(self.x, self.ends, None, b).column, dy.column_ends
        left = grouped(self.x if gemm == "fprop" else self.dy, self.ends, a, None).row
        if b.family == "float8_block" and b.two_dimensional:
            return left, self.stacked(gemm, b), None
        ends = ends_of([self.n] * experts, self.device)
        flat = self.w.view(experts * self.n, self.k)
        if gemm == "fprop":
            return left, Experts.of_rows(grouped(flat, ends, b, None).row, experts), None
        column = grouped(flat, ends, None, b).column
        return left, Experts.of_columns(column, experts, self.n), None

    def stacked(self, gemm: str, b: Format) -> Experts:
        """The weights cast one by one."""
        weights = self.w if gemm == "fprop" else self.w.transpose(1, 2)
        planes = [encoded(w.cpu(), b).map(lambda p: p.to(self.device)) for w in weights]
        return Experts.of_planes(planes)

    def singles(self, gemm: str, a: Format, b: Format) -> list[tuple[Plane, Plane]]:
        """The planes of every expert as if it were alone, on the CPU."""
        weights = self.w.cpu()
        made = []
        for w, x, dy in zip(
            weights, self.x.cpu().split(self.split), self.dy.cpu().split(self.split), strict=True
        ):
            left, right = {"fprop": (x, w), "dgrad": (dy, w.t()), "wgrad": (dy.t(), x.t())}[gemm]
            made.append((encoded(left, a), encoded(right, b)))
        return made

    def exact(self, gemm: str, a: Format, b: Format) -> torch.Tensor:
        """FP64 of the decoded planes."""
        found = []
        for left, right in self.singles(gemm, a, b):
            left, right = (p.format.decode(p).double() for p in (left, right))
            found.append(left @ right.t())
        return torch.stack(found) if gemm == "wgrad" else torch.cat(found)


def run(kernel, name, planes, layer: Layer, out_dtype=torch.float32, **options):
    """``grouped_gemm`` of what ``Layer.planes`` made."""
    a, b, column_ends = planes
    return grouped_gemm(
        kernel, name, a, b, layer.ends, out_dtype, column_ends=column_ends, **options
    )


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got = got.cpu().double()
    assert got.shape == wanted.shape and not got.isnan().any()
    return ((got - wanted).norm() / wanted.norm().clamp(min=1e-300)).item()


# torch's grouped kernels on the CPU, with every check and device assert of the CUDA ones.
def _check_layout(x: torch.Tensor) -> bool:
    """Whether ``x`` is column-major; strides in multiples of 16 bytes."""
    rows, columns = x.shape[-2:]
    per_16 = 16 // x.element_size()
    assert x.storage_offset() % per_16 == 0
    if x.stride(-2) == 1 and x.stride(-1) >= max(1, rows):
        assert x.stride(-1) % per_16 == 0
        return True
    assert x.stride(-1) == 1 and x.stride(-2) >= max(1, columns), (x.shape, x.stride())
    assert x.stride(-2) % per_16 == 0
    return False


def _groups(left, right, offs):
    """Operands of each group, by the checks of GroupMMCommon.cuh."""
    a_row_major, b_row_major = not _check_layout(left), not _check_layout(right)
    assert offs.dtype == torch.int32 and left.dim() == 2
    bounds = [0, *offs.tolist()]
    for e, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        assert end >= start
        if right.dim() == 3:
            assert end <= left.shape[0] and left.shape[1] == right.shape[1]
            yield left[start:end], right[e]
            continue
        assert end <= left.shape[1] and left.shape[1] == right.shape[0]
        if a_row_major or not b_row_major:
            assert end > start, "ragged contraction of a group must not be empty"
            assert (end - start) * left.element_size() % 16 == 0 or end == bounds[-1]
        yield left[:, start:end], right[start:end]


def _joined(parts, left, right, dtype):
    if right.dim() == 2:
        return torch.stack(parts).to(dtype)
    result = torch.full((left.shape[0], right.shape[2]), torch.nan, dtype=dtype)
    made = torch.cat(parts)
    result[: len(made)] = made
    return result


def grouped_mm(left, right, *, offs):
    assert left.dtype == right.dtype == torch.bfloat16
    parts = [a.float() @ b.float() for a, b in _groups(left, right, offs)]
    return _joined(parts, left, right, torch.bfloat16)


def scaled_grouped_mm(
    left, right, scale_a, recipe_a, scale_b, recipe_b, *, offs, output_dtype, use_fast_accum
):
    assert recipe_a == recipe_b == torch.nn.functional.ScalingType.RowWise
    assert left.dtype == right.dtype == torch.float8_e4m3fn and output_dtype == torch.bfloat16
    assert not _check_layout(left) and _check_layout(right)
    assert left.shape[-1] % 16 == 0 and right.shape[-1] % 16 == 0 and right.shape[-2] % 16 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32 and scale_a.is_contiguous()
    experts, rows, columns = len(offs), left.shape[0], right.shape[-1]
    if right.dim() == 2:
        assert scale_a.shape == (rows * experts,) and scale_b.shape == (columns * experts,)
        scale_a, scale_b = scale_a.view(experts, rows), scale_b.view(experts, columns)
    else:
        assert scale_a.shape == (rows,) and scale_b.shape == (experts, columns)
        bounds = [0, *offs.tolist()]
        scale_a = [scale_a[s:e] for s, e in zip(bounds, bounds[1:], strict=False)]
    assert scale_b.stride(1) == 1
    parts = [
        (a.float() @ b.float()) * sa[:, None] * sb
        for (a, b), sa, sb in zip(_groups(left, right, offs), scale_a, scale_b, strict=True)
    ]
    return _joined(parts, left, right, output_dtype)
