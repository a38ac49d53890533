"""plan(): what a recipe does to a model, GEMM by GEMM, without running anything."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch

from .distributed import collectives
from .distributed.plane_gather import HIGH_PRECISION, Wire, choose_wire
from .extension import why_unavailable, why_unsupported
from .formats.dtypes import DType
from .formats.float8 import Float8Quantizer
from .formats.plane import DIRECTIONS, Format
from .formats.quantizer import Quantizer
from .modules.base import QuantizedModule
from .modules.composite import Composite
from .modules.grouped_binding import choose_grouped, choose_single, formats_of
from .modules.grouped_linear import GroupedLinear
from .naming import name_unbound
from .ops.gemm import DEVICES, Kernel, PairRefused, device_kind, scale_kind
from .recipe import CustomRecipe
from .resolution import Site, ask_factory, choose_kernel, source_of
from .roles import LINEAR_GEMMS, GemmOperands

BUCKETS = ("fast", "unoptimized", "emulated", "rejected")


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One GEMM of one module.

    formats: of operands A and B; sources: where their planes come from ("original" or
    "rowwise_dequantized"); bucket: fast, unoptimized, emulated or rejected; saved_bytes: kept for
    backward because of this GEMM; wire_bytes: received by this rank per step because of it.
    """

    module: str
    gemm: str
    formats: tuple[str, str]
    sources: tuple[str, str]
    bucket: str
    kernel: str
    reason: str
    saved_bytes: int
    wire_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rows of plan(); ``str()`` is a table. ``ok`` is False when some GEMM is rejected."""

    device: str
    execution: str
    tokens: int
    rows: tuple[PlanRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.bucket != "rejected" for row in self.rows)

    def counts(self) -> dict[str, int]:
        """Number of GEMMs per bucket."""
        return {b: sum(row.bucket == b for row in self.rows) for b in BUCKETS}

    def __str__(self) -> str:
        header = ("module", "gemm", "A × B", "bucket", "kernel", "saved", "wire", "reason")
        table = [header]
        for row in self.rows:
            pair = " × ".join(
                text if source == "original" else f"{text} of dequantized rows"
                for text, source in zip(row.formats, row.sources, strict=True)
            )
            sizes = (_bytes(row.saved_bytes), _bytes(row.wire_bytes))
            table.append((row.module, row.gemm, pair, row.bucket, row.kernel, *sizes, row.reason))
        widths = [max(len(line[i]) for line in table) for i in range(len(header) - 1)]
        lines = [
            "  ".join(
                [*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]]
            ).rstrip()
            for line in table
        ]
        counts = ", ".join(f"{n} {bucket}" for bucket, n in self.counts().items() if n)
        title = (
            f"plan for {self.device}, execution={self.execution}, {self.tokens} tokens: {counts}"
        )
        return "\n".join([title, *lines])


def plan(
    model: torch.nn.Module,
    recipe: CustomRecipe,
    *,
    device: str | torch.device | None = None,
    training: bool = True,
    tokens: int = 4096,
) -> Plan:
    """What every GEMM of ``model`` would be under ``recipe``; nothing is run or communicated.

    device: "cpu", "sm_90", "sm_100", or a torch device; default: that of the first parameter. A
    kind such as "sm_90" is answered for the package, a torch device for what is built here.
    training: include dgrad and wgrad. tokens: rows of the whole input, for the byte columns.
    Names unnamed modules (assign_names) that no recipe was resolved for yet, as running them under
    another name would change what the factory answers. A factory that fails raises its own error.
    """
    if not isinstance(recipe, CustomRecipe):
        raise TypeError(
            f"recipe is {recipe!r}; accepted: a CustomRecipe, "
            "e.g. CustomRecipe(qfactory=dist_finegrain.factories.mxfp8_factory)"
        )
    kind, why_unfused = _device_kind(model, device)
    name_unbound(model)
    rows: list[PlanRow] = []
    for module in model.modules():
        # The GEMMs of a composite are those of its parts, which are modules of the model too.
        if isinstance(module, QuantizedModule) and not isinstance(module, Composite):
            rows_of = _grouped_rows if isinstance(module, GroupedLinear) else _module_rows
            rows += rows_of(module, recipe, kind, why_unfused, training, tokens)
    return Plan(kind, recipe.resolved_execution, tokens, tuple(rows))


def _device_kind(model: torch.nn.Module, device: Any) -> tuple[str, str]:
    """(kind of the device, why its casts are no compiled kernels; "" when they are)."""
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device in DEVICES or (str(device).startswith("sm_") and str(device)[3:].isdigit()):
        return device, why_unsupported(device)
    try:
        device = torch.device(device)
        return device_kind(device), why_unavailable(device)
    except (RuntimeError, AssertionError):
        raise ValueError(
            f"device={device!r}; accepted: {', '.join(DEVICES)} or a torch device, "
            "e.g. device='sm_90'"
        ) from None


def _module_rows(
    module: QuantizedModule,
    recipe: CustomRecipe,
    kind: str,
    why_unfused: str,
    training: bool,
    tokens: int,
) -> list[PlanRow]:
    site = module.resolution_site(kind)
    slots = [s for s in module.get_quantizer_slots() if training or s.direction == "forward"]

    def unbound(slot, child, request) -> Quantizer:
        element = request.element(forward=slot.direction == "forward")
        return Float8Quantizer(torch.ones(1), torch.zeros(1), DType(element))

    quantizers = ask_factory(recipe, slots, site, unbound)
    return [
        _row(module, operands, quantizers, site, recipe, why_unfused, tokens)
        for operands in LINEAR_GEMMS
        if training or operands.gemm == "fprop"
    ]


def _grouped_rows(
    module: GroupedLinear,
    recipe: CustomRecipe,
    kind: str,
    why_unfused: str,
    training: bool,
    tokens: int,
) -> list[PlanRow]:
    """One row per GEMM where all experts share its formats, else one per group of alike experts."""
    site = module.resolution_site(kind)

    def unbound(slot, child, request) -> Quantizer:
        element = request.element(forward=slot.direction == "forward")
        return Float8Quantizer(torch.ones(1), torch.zeros(1), DType(element))

    quantizers: dict[str, list[Quantizer]] = {}
    for direction in ("forward", "backward") if training else ("forward",):
        for slots in module.slots_of_experts(direction):
            for slot_kind, quantizer in ask_factory(recipe, slots, site, unbound).items():
                quantizers.setdefault(slot_kind, []).append(quantizer)
    rows = []
    for operands in LINEAR_GEMMS:
        if not training and operands.gemm != "fprop":
            continue
        alike: dict[Any, list[int]] = {}
        for e in range(module.num_gemms):
            pair = [formats_of(quantizers[slot][e]) for slot, _ in operands.sides]
            alike.setdefault(tuple(pair), []).append(e)
        for experts in alike.values():
            rows.append(
                _grouped_row(
                    module, operands, quantizers, experts, site, recipe, why_unfused, tokens
                )
            )
    return rows


def _grouped_row(
    module: GroupedLinear,
    operands: GemmOperands,
    quantizers: dict[str, list[Quantizer]],
    experts: list[int],
    site: Site,
    recipe: CustomRecipe,
    why_unfused: str,
    tokens: int,
) -> PlanRow:
    """The GEMM of ``experts``, of equal formats; tokens are shared out evenly."""
    sides, execution, count = operands.sides, recipe.resolved_execution, len(experts)
    formats = [quantizers[slot][experts[0]].plane_format(d) for slot, d in sides]
    dtype = module.weight0.dtype

    def choose(sizes_known: bool):
        return choose_grouped(
            operands, quantizers, site, execution, dtype, sizes_known, why_unfused
        )

    try:
        single = choose_single(
            operands, {slot: [quantizers[slot][experts[0]]] for slot, _ in sides}, site, execution
        )[0]
        kernel, why_single = choose(True)
        chosen = kernel or single
        name, reasons = chosen.name, [chosen.reason]
        if kernel is None:
            name, reasons = f"{name}, expert by expert", [f"experts one by one: {why_single}"]
            reasons.append(single.reason)
        is_loop = kernel is None or kernel.is_loop
        bucket = "emulated" if chosen.execution == "emulated" else "fast"
        if bucket == "fast" and (is_loop or why_unfused):
            bucket = "unoptimized"
            if why_unfused and kernel is not None:
                reasons.append(f"casts are plain torch, not one fused kernel ({why_unfused})")
        try:
            other, _ = choose(False)
            if other.name != name and site.device != "cpu":
                reasons.append(f"with m_splits on the device: {other.name}")
        except PairRefused:
            if site.device != "cpu":  # a CPU tensor is read on the host
                reasons.append("m_splits must be a list")
        reason = "; ".join(filter(None, reasons))
    except PairRefused as refusal:
        bucket, name, reason = "rejected", "–", str(refusal)
    label = operands.gemm
    if count < module.num_gemms:
        numbers = ", ".join(str(module.first_expert + e) for e in experts)
        label = f"{label} of experts {numbers}"
    share = tokens * count // module.num_gemms
    saved = {
        "dgrad": count * _saved_bytes(operands, formats[1], site, tokens),
        "wgrad": _saved_bytes(operands, formats[1], site, share),
    }
    return PlanRow(
        module=site.name,
        gemm=label,
        formats=(formats[0].describe(), formats[1].describe()),
        sources=tuple(source_of(quantizers[slot][experts[0]], d) for slot, d in sides),
        bucket=bucket,
        kernel=name,
        reason=reason,
        saved_bytes=saved.get(operands.gemm, 0),
        wire_bytes=0,
    )


def _row(
    module: QuantizedModule,
    operands: GemmOperands,
    quantizers: dict[str, Quantizer],
    site: Site,
    recipe: CustomRecipe,
    why_unfused: str,
    tokens: int,
) -> PlanRow:
    sides = operands.sides
    formats = [quantizers[slot].plane_format(direction) for slot, direction in sides]
    stored = formats[1]
    others = [quantizers[slot].plane_format(d) for slot, _ in sides for d in DIRECTIONS]
    if any(other.family == "user" for other in others):
        why_unfused = why_unfused or "a user's own encode() makes the other plane"
    try:
        kernel = choose_kernel(operands, quantizers, site, recipe.resolved_execution)
        gathering = _gathering(operands, quantizers, module, site, tokens)
        bucket, reason = _bucket(kernel, operands.gemm, formats, module, why_unfused, gathering)
        name, stored = kernel.name, kernel.stored(formats[1])
        if operands.gemm in recipe.fast_accumulation and kernel.execution == "native":
            if kernel.has_fast:
                name += ", fast accumulation"
            elif formats[0].family != "identity":
                note = "no fast accumulation in this kernel"
                reason = f"{reason}; {note}" if reason else note
    except PairRefused as refusal:
        bucket, name, reason = "rejected", "–", str(refusal)
    return PlanRow(
        module=site.name,
        gemm=operands.gemm,
        formats=(formats[0].describe(), formats[1].describe()),
        sources=tuple(source_of(quantizers[slot], direction) for slot, direction in sides),
        bucket=bucket,
        kernel=name,
        reason=reason,
        saved_bytes=_saved_bytes(operands, stored, site, _kept_rows(module, tokens)),
        wire_bytes=_wire_bytes(operands, quantizers, module, site, tokens),
    )


def _bucket(
    kernel: Kernel, gemm: str, formats: list[Format], module: Any, why_unfused: str, gathering: str
) -> tuple[str, str]:
    """Bucket of a GEMM that runs, and why it is not the bucket before."""
    if kernel.execution == "emulated":
        return "emulated", "; ".join(filter(None, (kernel.reason, gathering)))
    reasons = []
    if any(f.family != "identity" for f in formats):
        if why_unfused:
            reasons.append(f"casts are plain torch, not one fused kernel ({why_unfused})")
        if {scale_kind(f) for f in formats} == {"tensor", "row"}:
            reasons.append("the per-tensor scale is repeated for each row")
        if gemm == "fprop" and getattr(module, "reads_norm", False):
            reasons.append("the norm before it and the cast are two kernels")
        if gathering:
            reasons.append(gathering)
    return ("unoptimized" if reasons else "fast"), "; ".join(reasons)


def _kept_rows(module: Any, tokens: int) -> int:
    """Rows of X that this rank keeps for wgrad: its own where X is gathered."""
    is_gathered = module.parallel_mode == "column" and module.sequence_parallel
    return tokens // (collectives.group_size(module.quantization_group()) if is_gathered else 1)


def _saved_bytes(operands: GemmOperands, b: Format, site: Site, tokens: int) -> int:
    """Bytes of the plane that forward saves for this backward GEMM: W.col or X.col."""
    shape = {"dgrad": (site.k, site.n), "wgrad": (site.k, tokens)}.get(operands.gemm)
    is_parameter = b.family == "identity" and operands.b == "weight"
    if shape is None or is_parameter or b.family == "user":
        return 0
    return b.empty(shape, torch.bfloat16, torch.device("meta")).nbytes


_GATHERED = {("column", "fprop"), ("column", "wgrad"), ("row", "dgrad"), ("row", "wgrad")}


def _wire(
    operands: GemmOperands, quantizers: dict[str, Quantizer], module: Any, site: Site, tokens: int
) -> tuple[Wire, str] | None:
    """What travels for the gathered operand of this GEMM, and how its own plane gets to every rank.

    None where no operand is gathered. BF16 is taken for high precision.
    """
    ranks = collectives.group_size(module.quantization_group())
    is_gathered = (module.parallel_mode, operands.gemm) in _GATHERED
    if ranks == 1 or not module.sequence_parallel or not is_gathered:
        return None
    is_column = module.parallel_mode == "column"
    slot, features = ("input", site.k) if is_column else ("grad_output", site.n)
    is_fprop, both = operands.gemm == "fprop", not is_column
    wire = choose_wire(
        quantizers[slot], both or is_fprop, both or not is_fprop, tokens // ranks, features,
        torch.bfloat16,
    )  # fmt: skip
    return wire, wire.columnwise if operands.gemm == "wgrad" else wire.rowwise


def _gathering(operands: GemmOperands, quantizers, module: Any, site: Site, tokens: int) -> str:
    """Why the gather of this GEMM's operand costs more than its plane; "" when it does not."""
    found = _wire(operands, quantizers, module, site, tokens)
    if found is None:
        return ""
    slot = "input" if module.parallel_mode == "column" else "grad_output"
    is_row = operands.gemm != "wgrad"
    format = quantizers[slot].plane_format("rowwise" if is_row else "columnwise")
    if found[1] == HIGH_PRECISION and format.family != "identity":
        return "sequence-parallel gather in high precision"
    rows = tokens // collectives.group_size(module.quantization_group())
    block = format.block[0 if is_row else 1]
    if rows % block:
        return f"{rows} rows per rank are no multiple of {block}: blocks end at each rank's rows"
    return ""


def _wire_bytes(
    operands: GemmOperands, quantizers: dict[str, Quantizer], module: Any, site: Site, tokens: int
) -> int:
    """Bytes that this rank receives for one GEMM's gather and reduction; sums are in BF16.

    What serves dgrad and wgrad at once is counted at dgrad.
    """
    ranks = collectives.group_size(module.quantization_group())
    if ranks == 1:
        return 0
    column, sp, gemm = module.parallel_mode == "column", module.sequence_parallel, operands.gemm
    share = 2 * tokens * (ranks - 1) // ranks  # one all-gather or reduce-scatter, per feature
    reduce = share if sp else 2 * share  # an all-reduce is a reduce-scatter and an all-gather
    found = _wire(operands, quantizers, module, site, tokens)
    gathered = (ranks - 1) * found[0].nbytes if found else 0
    if column:
        return gathered + (reduce * site.k if gemm == "dgrad" else 0)
    return {"fprop": reduce * site.n, "dgrad": gathered}.get(gemm, 0)


def _bytes(count: int) -> str:
    if count == 0:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def load_object(path: str, what: str) -> Callable:
    """The object at "package.module:attribute"; ValueError naming ``what`` when there is none."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{what}={path!r} cannot be imported ({error}); accepted: package.module:attribute, "
            f"e.g. {what}=dist_finegrain.factories:mxfp8_factory"
        ) from error
