"""GEMMs of all experts of a layer in one call: which kernel, and the kernels.

Legend: E experts with m tokens each, M together; N out_features, K in_features; e is one expert.

    fprop  Y_e  = X.row_e  · W.row_eᵀ      [m, K] · [N, K]ᵀ    ragged rows
    dgrad  dX_e = dY.row_e · W.col_eᵀ      [m, N] · [K, N]ᵀ    ragged rows
    wgrad  dW_e = dY.col_e · X.col_eᵀ      [N, m] · [K, m]ᵀ    ragged contraction

Sizes stay on the device: nothing here waits for it, unless the caller gives them as Python numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from ..extension import build_info
from ..formats.plane import Format, Plane
from . import grouped_kernels as kernels
from .experts import Experts, column_widths
from .gemm import Kernel, PairRefused, scale_kind, select
from .lt import is_aligned
from .matmul import _exact_in_bf16, emulation_note

GEMMS = ("fprop", "dgrad", "wgrad")
MOST_EXPERTS = 1023  # of torch's grouped kernels
_ROW_SCALED = ("tensor", "row")
_MULTIPLE = 16  # of K and N, of the native kernel
_BLOCK = 128  # of weights in 128×128 blocks, so that none reaches over experts
# Elsewhere torch's grouped_mm reads the sizes on the host and loops.
_GROUPED_DEVICES = ("sm_90", "sm_100")


@dataclasses.dataclass(frozen=True)
class GroupedKernel(Kernel):
    """One way to run a GEMM of all experts.

    reason: why not a native kernel of all experts, or what that one costs. needs_sizes: on CUDA the
    experts' token counts must be known on the host (``sizes`` of ``grouped_gemm``). is_loop: of
    single GEMMs. rounds_to_bf16: the products are rounded to BF16 whatever dtype is asked for.
    writes_each: into a matrix of each expert's wgrad, which it can add to, without a temporary.
    """

    needs_sizes: bool = False
    is_loop: bool = False
    rounds_to_bf16: bool = False
    writes_each: bool = False

    @property
    def most_experts(self) -> int | None:
        """How many experts it takes; None: any number."""
        return None if self.is_loop or self.needs_sizes else MOST_EXPERTS


def grouped_gemm(
    kernel: GroupedKernel,
    name: str,
    a: Plane,
    b: Experts | Plane,
    ends: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    column_ends: torch.Tensor | None = None,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    accumulate: bool | Sequence[bool] = False,
    fast: bool = False,
) -> torch.Tensor | None:
    """The GEMM ``name`` of every expert, by the kernel that ``select_grouped`` chose for it.

    fprop, dgrad: ``a`` is the grouped row plane of X [M, K] or dY [M, N] (``cast_grouped``), ``b``
    the experts' weight planes; result Y [M, N] or dX [M, K]. wgrad: ``a`` and ``b`` are the grouped
    column planes of dY and X; result dW [E, N, K], zero for experts without tokens.

    ends: int32 [E] on the planes' device, cumulative token counts, the last one M (not checked on
    CUDA, where rows after it would stay unwritten). column_ends: those of the column planes, for
    wgrad. sizes: tokens of each expert, where the host knows them.
    out: receives the result, of its shape and ``out_dtype``; accumulate: add to ``out``, in FP32
    when it is FP32. For wgrad it may also be E matrices [N, K] of any dtype, None where an expert's
    is not wanted; the result is None then, ``out_dtype`` unused, and accumulate one for each.
    fast: fast accumulation where the kernel has it.

    Raises TypeError for a ``b`` of another kind and ValueError for arguments that do not fit, by
    name, before any launch.
    """
    _check_operands(name, a, b, ends, column_ends, kernel.most_experts)
    rows, columns = a.shape[0], b.shape[0]
    shape = (len(ends), rows, columns) if name == "wgrad" else (rows, columns)
    each = None if out is None or isinstance(out, torch.Tensor) else tuple(out)
    if each is None:
        _check_out("out", out, accumulate, shape, out_dtype, ends.device)
    else:
        adds = (accumulate,) * len(each) if isinstance(accumulate, bool) else tuple(accumulate)
        _check_each(each, name, adds, shape, ends.device)
    sizes = _checked_sizes(kernel, name, a, ends, column_ends, sizes)
    product = kernels.Product(
        name, a, b, ends, column_ends, sizes, out_dtype, fast and kernel.has_fast
    )
    if each and kernel.writes_each and all(map(_is_written_in_place, each)):
        product = dataclasses.replace(product, outs=each, accumulate=adds)
    elif each:  # rounded once, with what it is added to
        product = dataclasses.replace(product, out_dtype=torch.float32)
    if 0 in (*a.shape, columns):
        result = torch.zeros(shape, dtype=out_dtype, device=a.parts[0].device)
    else:
        result = kernel.run(product)
    if out is None:
        return result.to(out_dtype)
    if each is None:
        return out.add_(result) if accumulate else out.copy_(result)
    if result is not None:
        for matrix, made, is_sum in zip(each, result, adds, strict=True):
            if matrix is not None:
                matrix.add_(made) if is_sum else matrix.copy_(made)
    return None


def _is_written_in_place(matrix: torch.Tensor | None) -> bool:
    """Whether a kernel that ``writes_each`` can write there, or has nothing to write."""
    if matrix is None:
        return True
    is_known = matrix.dtype in (torch.float32, torch.bfloat16)
    return is_known and matrix.is_contiguous() and is_aligned(matrix)


def _check_operands(
    name: str,
    a: Plane,
    b: Experts | Plane,
    ends: torch.Tensor,
    column_ends: torch.Tensor | None,
    most: int | None,
) -> None:
    if name not in GEMMS:
        raise ValueError(f"name is {name!r}; accepted: {', '.join(GEMMS)}, e.g. name='fprop'")
    wanted = Plane if name == "wgrad" else Experts
    if not isinstance(b, wanted):
        raise TypeError(
            f"b of a {name} is {type(b).__name__}; accepted: {wanted.__name__}, e.g. "
            f"{'cast_grouped(...).column' if name == 'wgrad' else 'Experts.of_rows(plane, count)'}"
        )
    device, count = a.parts[0].device, ends.numel()
    for what, tensor in (("ends", ends), ("column_ends", column_ends)):
        if what == "column_ends" and name != "wgrad":
            continue
        got = tensor if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device}"
        is_list = tensor is not None and tuple(tensor.shape) == (count,)
        is_list = is_list and tensor.dtype == torch.int32 and tensor.device == device
        if not is_list or count < 1 or (most and count > most):
            raise ValueError(
                f"{what} of a {name} is {got}; accepted: torch.int32 [E] on {device}, one end for "
                f"each of 1 to {most or 'any number of'} experts, as cast_grouped takes and "
                "returns them"
            )
    if name != "wgrad" and b.count != len(ends):
        raise ValueError(
            f"b holds {b.count} experts, ends {len(ends)}; accepted: one plane for each expert"
        )
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"a has contraction {a.shape[1]}, b {b.shape[1]}; accepted: equal ones, e.g. both "
            f"{a.shape[1]}"
        )


def _check_each(each, name: str, accumulate, shape, device: torch.device) -> None:
    if name != "wgrad" or not len(each) == len(accumulate) == shape[0]:
        raise ValueError(
            f"out and accumulate of a {name} have {len(each)} and {len(accumulate)} entries; "
            f"accepted: one tensor of shape {shape} and a bool, or for wgrad lists with an entry "
            "for each expert, e.g. out=[None, main_grad]"
        )
    for index, matrix in enumerate(each):
        if matrix is not None:
            _check_out(f"out[{index}]", matrix, False, shape[1:], matrix.dtype, device)


def _check_out(what: str, out, accumulate: bool, shape, dtype, device: torch.device) -> None:
    if out is None:
        if accumulate:
            raise ValueError("accumulate is True and out None; accepted: the tensor to add to")
        return
    if (tuple(out.shape), out.dtype, out.device) != (shape, dtype, device):
        raise ValueError(
            f"{what} is {out.dtype} {tuple(out.shape)} on {out.device}; accepted: {dtype} {shape} "
            f"on {device}"
        )


def _checked_sizes(
    kernel: GroupedKernel,
    name: str,
    a: Plane,
    ends: torch.Tensor,
    column_ends: torch.Tensor | None,
    sizes: Sequence[int] | None,
) -> Sequence[int] | None:
    """Tokens of each expert, read from ``ends`` on a CPU; None where only the device knows them."""
    if sizes is None:
        if ends.device.type != "cpu":
            if kernel.needs_sizes:
                raise ValueError(
                    f"sizes is None, but {kernel.name} needs the tokens of each expert on the "
                    "host; accepted: a list, e.g. sizes=[128, 256]"
                )
            return None
        bounds = [0, *ends.tolist()]
        sizes = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    room = a.shape[1] if name == "wgrad" else a.shape[0]
    taken = sum(column_widths(a.format, sizes)) if name == "wgrad" else sum(sizes)
    fits = taken <= room if name == "wgrad" else taken == room
    if len(sizes) != len(ends) or min(sizes) < 0 or not fits:
        raise ValueError(
            f"the experts have {list(sizes)} tokens, which take {taken} of {room} "
            f"{'contraction' if name == 'wgrad' else 'rows'} of a; accepted: {len(ends)} counts of "
            "at least 0 that account for all tokens, e.g. ends[-1] == M"
        )
    if name == "wgrad" and ends.device.type == "cpu":
        widths = torch.tensor(column_widths(a.format, sizes)).cumsum(0)
        if not torch.equal(widths.to(torch.int32), column_ends):
            raise ValueError(
                f"column_ends is {column_ends.tolist()}; accepted: {widths.tolist()} for "
                f"{a.format.describe()} and {list(sizes)} tokens, as cast_grouped returns it"
            )
    return sizes


def select_grouped(
    gemm: str,
    a: Format,
    b: Format,
    device: str,
    execution: str,
    *,
    k: int,
    n: int,
    dtype: torch.dtype = torch.bfloat16,
    sizes_known: bool = False,
) -> GroupedKernel:
    """The kernel for one operand pair of a grouped linear layer with ``k`` in, ``n`` out features.

    execution: "native", "emulate" or "reference"; dtype: the compute dtype; sizes_known: every
    call will give ``sizes`` (m_splits is a Python list). Raises PairRefused with the reason.
    """
    _check_blocks(gemm, a, b)
    if device == "cpu":
        single = select(gemm, a, b, device, execution, k=k, n=n)
        return _expert_by_expert(single, single.reason)
    mode = "reference" if execution == "reference" else "emulate"
    single = select(gemm, a, b, device, mode, k=k, n=n)
    if a.family == b.family == "identity":
        return _identity_kernel(single, a.dtype or dtype, device, sizes_known)
    if "user" in (a.family, b.family):
        return _emulated_kernel(single, single.reason, a, b, device, sizes_known)
    if single.execution == "native" and sizes_known and _runs_for_each(gemm, a, b, k, n):
        return GroupedKernel(
            f"{single.name} for each expert",
            "native",
            kernels.cublaslt,
            has_fast=single.has_fast,
            needs_sizes=True,
            writes_each=True,
        )
    reason = _why_not_native(a, b, device, k, n)
    if not reason and execution != "reference":
        note = "rounded to BF16 before it is added to main_grad" if gemm == "wgrad" else ""
        return GroupedKernel(
            "scaled_grouped_mm rowwise",
            "native",
            kernels.native,
            reason=note,
            has_fast=True,
            rounds_to_bf16=True,
        )
    reason = reason or single.reason
    if single.execution == "native" and sizes_known:
        return _expert_by_expert(single, f"experts one by one: {reason}", needs_sizes=True)
    if execution == "native":
        hint = ""
        if single.execution == "native":
            hint = "m_splits as a Python list runs the experts natively one by one, "
        raise PairRefused(
            f"{reason}; ways out: {hint}execution='emulate' (or DIST_FINEGRAIN_EXECUTION=emulate) "
            "runs it without FP8 tensor-core speed, or a grouped format that is native on sm_90: "
            "E4M3 with tensor or row scales, or IdentityQuantizer"
        )
    return _emulated_kernel(single, reason, a, b, device, sizes_known)


def _check_blocks(gemm: str, a: Format, b: Format) -> None:
    for side, format in (("A", a), ("B", b)):
        is_cast_grouped = side == "A" or gemm == "wgrad"
        is_square = format.family == "float8_block" and format.two_dimensional
        if is_cast_grouped and is_square:
            raise PairRefused(
                f"operand {side} of a grouped {gemm} is {format.describe()}, whose 128×128 blocks "
                "reach over experts; accepted: 1×128 blocks, e.g. "
                "Float8BlockQuantizer(fp8_dtype, block_scaling_dim=1)"
            )


def _runs_for_each(gemm: str, a: Format, b: Format, k: int, n: int) -> bool:
    """Whether one compiled call multiplies this native pair for every expert."""
    if build_info().gemm_reason:
        return False
    kinds = scale_kind(a), scale_kind(b)
    if set(kinds) <= set(_ROW_SCALED):
        return True
    if gemm == "wgrad":
        return kinds == ("1x128", "1x128")
    return kinds == ("1x128", "128x128") and k % _BLOCK == n % _BLOCK == 0


def _why_not_native(a: Format, b: Format, device: str, k: int, n: int) -> str:
    kinds = scale_kind(a), scale_kind(b)
    if not set(kinds) <= set(_ROW_SCALED):
        return f"no native kernel multiplies {kinds[0]} by {kinds[1]} for all experts at once"
    if device != "sm_90":
        return f"the native grouped FP8 kernel runs on sm_90 only, not on {device}"
    if (a.element, b.element) != ("e4m3", "e4m3"):
        return f"the native grouped FP8 kernel takes E4M3 only, not {a.element} × {b.element}"
    for dim, value in (("in_features", k), ("out_features", n)):
        if value % _MULTIPLE:
            return (
                f"{dim} of this rank is {value}, but the native grouped FP8 kernel needs a "
                f"multiple of {_MULTIPLE}, e.g. {-(-value // _MULTIPLE) * _MULTIPLE}"
            )
    return ""


def _expert_by_expert(single: Kernel, reason: str, *, needs_sizes: bool = False) -> GroupedKernel:
    return GroupedKernel(
        f"{single.name}, expert by expert",
        single.execution,
        functools.partial(kernels.one_by_one, single),
        reason=reason,
        has_fast=single.has_fast,
        needs_sizes=needs_sizes,
        is_loop=True,
    )


def _identity_kernel(
    single: Kernel, dtype: torch.dtype, device: str, sizes_known: bool
) -> GroupedKernel:
    if dtype == torch.bfloat16 and device in _GROUPED_DEVICES:
        return GroupedKernel("grouped_mm", "native", kernels.identity, rounds_to_bf16=True)
    reason = f"grouped_mm takes BF16 on {' and '.join(_GROUPED_DEVICES)}, not {dtype} on {device}"
    if sizes_known:
        return _expert_by_expert(single, f"experts one by one: {reason}", needs_sizes=True)
    raise PairRefused(
        f"{reason}; ways out: m_splits as a Python list, e.g. m_splits=[128, 256], which runs the "
        "experts one by one, or a BF16 model"
    )


def _emulated_kernel(
    single: Kernel, reason: str, a: Format, b: Format, device: str, sizes_known: bool
) -> GroupedKernel:
    if device in _GROUPED_DEVICES:
        is_exact = _exact_in_bf16(a) and _exact_in_bf16(b)
        how = emulation_note(a, b) if is_exact else "decoded to FP32, multiplied as BF16 pieces"
        return GroupedKernel(
            "decode + grouped_mm",
            "emulated",
            kernels.emulated if is_exact else kernels.emulated_in_pieces,
            reason=f"{reason} ({how}, the product rounded to BF16)",
        )
    reason = f"{reason}; grouped_mm waits for the device on {device}"
    if sizes_known:
        return _expert_by_expert(single, f"experts one by one: {reason}", needs_sizes=True)
    raise PairRefused(f"{reason}; way out: m_splits as a Python list, e.g. m_splits=[128, 256]")
