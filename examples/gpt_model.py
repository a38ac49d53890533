"""A byte-level GPT: norms, embedding, head and attention from torch, linears from dist_finegrain.

Its MLPs are dense, or mixtures of experts (``moe_layer.py``).

Legend: S sequence, B batch, H hidden, A heads, D head size, T tensor-parallel ranks.

Under sequence parallelism activations between the linears are [S/T, B, H]: rank r holds the r-th
piece of every sequence, so embedding, norms, head and loss see only that piece, and the gradients
of their parameters are partial sums (``parallel.reduce_gradients`` adds them up). Otherwise every
rank holds [S, B, H] and computes the same.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from dist_finegrain import Linear
from examples.moe_layer import BALANCE_WEIGHT, MoELayer

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of the whole model; ``tp`` ranks share each decoder layer.

    experts: of the mixture in each decoder layer, of which a token uses ``top_k``; 0: a dense MLP.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq_len: int = 128
    tp: int = 1
    sequence_parallel: bool = False
    seed: int = 0
    experts: int = 0
    top_k: int = 2

    def __post_init__(self):
        for name in ("layers", "hidden", "heads", "seq_len", "tp"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value}; accepted: a positive integer, e.g. {name}=4")
        if self.experts < 0 or (self.experts and not 1 <= self.top_k <= self.experts):
            raise ValueError(
                f"experts={self.experts} with top_k={self.top_k}; accepted: no expert, or top_k "
                "from 1 to experts, e.g. experts=4 with top_k=2"
            )
        _check_multiple("hidden", self.hidden, "2 × heads", 2 * self.heads)
        _check_multiple("heads", self.heads, "tp", self.tp)
        if self.sequence_parallel:
            _check_multiple("seq_len", self.seq_len, "tp", self.tp)


def _check_multiple(name: str, value: int, what: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(
            f"{name}={value}; accepted: a multiple of {what} = {divisor}, "
            f"e.g. {name}={-(-value // divisor) * divisor}"
        )


class Attention(torch.nn.Module):
    """Causal self-attention with rotary positions: heads are sharded over the tp ranks."""

    def __init__(self, config: GPTConfig, prefix: str, parallel: dict[str, Any]):
        super().__init__()
        h = config.hidden
        self.local_heads = config.heads // config.tp
        self.qkv = Linear(h, 3 * h, parallel_mode="column", name=f"{prefix}.qkv", **parallel)
        self.proj = Linear(h, h, parallel_mode="row", name=f"{prefix}.proj", **parallel)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        # Rows of the qkv weight go head by head, so that a shard is a set of whole heads.
        qkv = self.qkv(x)  # [S, B, 3·H/T]
        s, b, _ = qkv.shape
        heads = qkv.view(s, b, self.local_heads, 3, -1).permute(3, 1, 2, 0, 4)  # [3, B, A/T, S, D]
        q, k = normed_and_rotated(heads[0], rotation), normed_and_rotated(heads[1], rotation)
        y = functional.scaled_dot_product_attention(q, k, heads[2], is_causal=True)
        return self.proj(y.permute(2, 0, 1, 3).reshape(s, b, -1))


class MLP(torch.nn.Module):
    """fc1, GELU, fc2; the 4·H inner features are sharded over the tp ranks."""

    def __init__(self, config: GPTConfig, prefix: str, parallel: dict[str, Any]):
        super().__init__()
        h = config.hidden
        self.fc1 = Linear(h, 4 * h, parallel_mode="column", name=f"{prefix}.fc1", **parallel)
        self.fc2 = Linear(4 * h, h, parallel_mode="row", name=f"{prefix}.fc2", **parallel)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        """(y, no balancing loss), as ``MoELayer`` returns it."""
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh")), 0.0


class Block(torch.nn.Module):
    """One decoder layer, pre-norm; its linears are named ``decoder.<layer>.<qkv|proj|fc1|fc2>``."""

    def __init__(self, config: GPTConfig, layer: int, parallel: dict[str, Any]):
        super().__init__()
        prefix = f"decoder.{layer}"
        self.norm1 = torch.nn.RMSNorm(config.hidden)
        self.attention = Attention(config, prefix, parallel)
        self.norm2 = torch.nn.RMSNorm(config.hidden)
        if config.experts:
            self.mlp = MoELayer(config.hidden, config.experts, config.top_k, prefix, parallel)
        else:
            self.mlp = MLP(config, prefix, parallel)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor):
        """(x after this layer, the balancing loss of its experts)."""
        x = x + self.attention(self.norm1(x), rotation)
        y, balance = self.mlp(self.norm2(x))
        return x + y, balance


class GPT(torch.nn.Module):
    """Bytes [S, B] → this rank's share of the summed next-byte loss.

    tp_group: ranks that share the model; None with ``config.tp == 1``. Weights depend on the seed
    and the parameter's name only: every ``tp`` starts from the same whole model.
    """

    def __init__(self, config: GPTConfig, tp_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.config = config
        self.tp_rank = dist.get_rank(tp_group) if config.tp > 1 else 0
        parallel = {
            "tp_group": tp_group if config.tp > 1 else None,
            "tp_size": config.tp,
            "sequence_parallel": config.sequence_parallel,
        }
        self.embedding = torch.nn.Embedding(VOCABULARY, config.hidden)
        self.decoder = torch.nn.ModuleList(
            Block(config, layer, parallel) for layer in range(config.layers)
        )
        self.norm = torch.nn.RMSNorm(config.hidden)
        self.head = torch.nn.Linear(config.hidden, VOCABULARY, bias=False)
        rotation = rotary_table(config.seq_len, config.hidden // config.heads)
        self.register_buffer("rotation", rotation, persistent=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Matrices normal with 1/√fan_in, residual outputs smaller by √(2·layers)."""
        residual = 1 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norm scales stay one, biases zero
            shape = list(parameter.shape)
            is_sharded = is_tensor_parallel(parameter)
            if is_sharded:
                shape[parameter.partition_dim] *= self.config.tp
            seed = zlib.crc32(f"{self.config.seed}|{name}".encode())
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            whole *= 1 / math.sqrt(shape[1])
            if "proj.weight" in name or "fc2.weight" in name:  # an expert's ends with its number
                whole *= residual
            if is_sharded:
                whole = whole.chunk(self.config.tp, parameter.partition_dim)[self.tp_rank]
            parameter.copy_(whole)

    def local_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of tokens [S, B] whose embedding and loss this rank computes."""
        if not self.config.sequence_parallel:
            return tokens
        return tokens.chunk(self.config.tp)[self.tp_rank]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """tokens, targets [S, B] int64, the same on all tp ranks → summed loss, nats, FP32.

        Under sequence parallelism the sum is over this rank's S/T positions. Experts' balancing
        loss is in the gradients, not in the value.
        """
        x = self.embedding(self.local_tokens(tokens))
        rotation = self.rotation[: tokens.shape[0]]
        balance = 0.0
        for block in self.decoder:
            x, of_block = block(x, rotation)
            balance = balance + BALANCE_WEIGHT * of_block
        logits = self.head(self.norm(x)).float()
        targets = self.local_tokens(targets).flatten()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        return loss + (balance - balance.detach()) if self.config.experts else loss


def is_tensor_parallel(parameter: torch.nn.Parameter) -> bool:
    """Whether each tp rank holds a different shard of this parameter."""
    return getattr(parameter, "tensor_model_parallel", False)


def rotary_table(seq_len: int, head_size: int) -> torch.Tensor:
    """cos and sin of the rotary angles: [S, 2, D/2]."""
    frequency = 10000 ** (-torch.arange(0, head_size, 2) / head_size)
    angle = torch.outer(torch.arange(seq_len), frequency)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def normed_and_rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Queries or keys [..., S, D] with unit RMS and rotary positions, in x's dtype.

    The norm bounds the attention logits: without it small errors of q and k, such as those of
    quantization, grow with the logits into wrong gradients.
    """
    cos, sin = rotation.unbind(1)
    a, b = functional.rms_norm(x.float(), x.shape[-1:]).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
