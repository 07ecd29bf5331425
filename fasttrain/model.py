"""The decoder: Qwen3's architecture, or Llama's without qk_norm, on fasttrain_kernels.

A norm belongs to whoever produces its input, not to whoever reads it. So every norm but the first is fused with the
addition before it, all blocks are alike, and what passes between them is the pair (normed, residual):

    normed, residual = norm(embedding), embedding
    each block:  normed, residual = add_norm(attention(normed), residual)
                 normed, residual = add_norm(feed_forward(normed), residual)
    loss         = cross_entropy(head(normed))

Projections that read the same input are one matrix: q, k and v; gate and up. Fewer, larger matmuls are faster, and
fasttrain.hf.names splits them for Transformers.

B sequences, T tokens each, C hidden, H heads, D head_dim, F ffn, V vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, zip_longest
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fasttrain_kernels as kernels
from fasttrain import config
from fasttrain.data.batches import IGNORED

_CUT = 3.0  # initial weights lie within so many standard deviations
_INIT_ROWS = 128  # that one seed initialises: a rank draws the rows of its shard, and at most so many around them


class Past(Protocol):
    """What a block knows of the tokens before those it is given: fasttrain.tools.generate."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, T, H, D), (B, T, Hkv, D) twice -> (B, T, H, D)
        """Of the queries, to all keys so far, these included."""
        ...


class Block(nn.Module):
    """Attention and feed-forward, each followed by the addition to the residual stream and the next norm."""

    def __init__(self, model: config.ModelConfig) -> None:
        super().__init__()
        C, D = model.hidden, model.head_dim
        self.heads = (model.heads, model.kv_heads, model.kv_heads)
        self.head_dim = D
        self.eps = model.norm_eps
        self.dropout = model.dropout
        self.attention_dropout = model.attention_dropout
        self.attention: dict[str, Any] = dict(backend=model.attention_backend, deterministic=model.deterministic)
        self.qkv = kernels.Linear(C, sum(self.heads) * D, bias=False)
        self.q_norm = nn.Parameter(torch.empty(D)) if model.qk_norm else None
        self.k_norm = nn.Parameter(torch.empty(D)) if model.qk_norm else None
        self.attention_out = kernels.Linear(model.heads * D, C, bias=False)
        self.ffn_norm = nn.Parameter(torch.empty(C))
        self.gate_up = kernels.Linear(C, 2 * model.ffn, bias=False)
        self.down = kernels.Linear(model.ffn, C, bias=False)
        self.next_norm = nn.Parameter(torch.empty(C))  # of what the next block, or the head, reads
        # Rows of the matrices that a packed one consists of: Muon treats each by itself.
        self.muon_splits = {"qkv.weight": [n * D for n in self.heads], "gate_up.weight": [model.ffn, model.ffn]}

    def forward(
        self,
        normed: Tensor,  # (B, T, C)
        residual: Tensor,  # (B, T, C)
        cos: Tensor,  # (S, D/2) float32
        sin: Tensor,  # (S, D/2) float32
        positions: Tensor | None = None,  # (B, T) or (T,)
        cu_seqlens: Tensor | None = None,  # (num_docs + 1,) int32
        documents: Tensor | None = None,  # (2, B * T) int32, of cu_seqlens
        max_seqlen: int | None = None,
        past: Past | None = None,
    ) -> tuple[Tensor, Tensor]:  # (B, T, C), (B, T, C)
        if cos.dtype != torch.float32:
            raise TypeError(
                f"Block: the rotary table came as {cos.dtype} and must be float32; FSDP casts the inputs of a module: "
                "give it MixedPrecisionPolicy(cast_forward_inputs=False)"
            )
        heads = self.qkv(normed).unflatten(-1, (sum(self.heads), self.head_dim))
        q, k, v = heads.split(self.heads, dim=-2)
        q, k = kernels.qk_norm_rope(q, k, self.q_norm, self.k_norm, cos, sin, positions=positions, eps=self.eps)
        bounds = dict(cu_seqlens=cu_seqlens, documents=documents, max_seqlen=max_seqlen)
        heads = self._attend(q, k, v, bounds) if past is None else past.attend(q, k, v)
        attended = self.attention_out(heads.flatten(-2))
        normed, residual = kernels.add_rms_norm(self._drop(attended), residual, self.ffn_norm, eps=self.eps)
        fed = kernels.swiglu_linear(self.gate_up(normed), self.down.weight)
        return kernels.add_rms_norm(self._drop(fed), residual, self.next_norm, eps=self.eps)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bounds: dict[str, Any]) -> Tensor:  # (B, T, H, D)
        if not (self.training and self.attention_dropout):
            return kernels.attention(q, k, v, **bounds, **self.attention)
        if bounds["documents"] is not None:
            raise ValueError(
                f"Block: attention_dropout {self.attention_dropout} cannot be combined with cu_seqlens; set "
                "data.document_mask to false or model.attention_dropout to 0"
            )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = self.heads[0] != self.heads[1]
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.attention_dropout, is_causal=True, enable_gqa=grouped
        ).transpose(1, 2)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


def run_blocks(
    blocks: Iterable[Callable[..., Any]], normed: Tensor, residual: Tensor, *args: Any, past: Sequence[Past]
) -> tuple[Tensor, Tensor]:  # (B, T, C), (B, T, C)
    """One after the other; past: of each, or of none."""
    for block, known in zip_longest(blocks, past):
        normed, residual = block(normed, residual, *args, known)
    return normed, residual


class Head(nn.Module):
    """From the last norm to the loss, in one call: a sharded head is gathered, and its gradient reduced, once.

    A tied head owns nothing; it is given the weight of the embedding.
    """

    def __init__(self, hidden: int, vocab: int, *, tied: bool, z_loss: float) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, hidden))
        self.z_loss = z_loss

    def forward(self, normed: Tensor, targets: Tensor, tied: Tensor | None) -> Tensor:  # (B, T, C), (B, T), (V, C)
        return kernels.linear_cross_entropy(
            normed, self._weight(tied), targets, ignore_index=IGNORED, z_loss=self.z_loss, reduction="sum"
        )

    def stats(self, normed: Tensor, targets: Tensor, tied: Tensor | None) -> kernels.TokenStats:  # (B, T) each
        return kernels.linear_cross_entropy_stats(normed, self._weight(tied), targets, ignore_index=IGNORED)

    def logits(self, normed: Tensor, tied: Tensor | None) -> Tensor:  # (B, T, V)
        return kernels.linear(normed, self._weight(tied))

    def _weight(self, tied: Tensor | None) -> Tensor:  # (V, C)
        weight = tied if self.weight is None else self.weight
        assert weight is not None
        return weight


class Decoder(nn.Module):
    """A decoder without its initial weights: call init_weights, or load a state dict.

    On the meta device, `to_empty` follows. Calls other than forward (stats, logits) have to be made known to FSDP:
    register_fsdp_forward_method.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        model: config.ModelConfig,
        *,
        vocab: int,
        sequence: int,  # the longest that it will see
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.config = model
        self.sequence = sequence
        self.unsharded: object = None  # fasttrain.distributed.unsharded, where it has the weights
        self.pads_documents = False  # cu_seqlens ends with empty ones: blocks know documents by their bounds alone
        self.embedding = nn.Embedding(vocab, model.hidden)
        self.first_norm = nn.Parameter(torch.empty(model.hidden))
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        # How many blocks are compiled, gathered and reduced together, and what runs them: distributed.parallelize
        self.units: list[tuple[int, Callable[..., tuple[Tensor, Tensor]]]]
        self.units = [(model.layers, functools.partial(run_blocks, self.blocks))]
        self.head = Head(model.hidden, vocab, tied=model.tied_head, z_loss=z_loss)
        self._build_rotary_table(None)

    def forward(
        self,
        tokens: Tensor,  # (B, T)
        targets: Tensor,  # (B, T); IGNORED: does not count
        cu_seqlens: Tensor | None = None,  # (num_docs + 1,) int32, over the flattened batch
        positions: Tensor | None = None,  # (B, T), within the document
        max_seqlen: int | None = None,  # no document is longer
    ) -> Tensor:  # () float32
        """The sum of all targets' losses, z-loss included: the mean is over those of all micro-batches and ranks."""
        return self.head(self._normed(tokens, cu_seqlens, positions, max_seqlen), targets, self._tied_weight())

    def stats(
        self,
        tokens: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> kernels.TokenStats:  # (B, T) each
        """Loss (without z-loss), lse, entropy and hit of every token. No gradient."""
        with torch.no_grad():
            return self.head.stats(
                self._normed(tokens, cu_seqlens, positions, max_seqlen), targets, self._tied_weight()
            )

    def logits(
        self,
        tokens: Tensor,  # (B, T)
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        past: Sequence[Past] = (),  # of each block
        places: Tensor | None = None,  # (N,) int64, in the flattened batch
    ) -> Tensor:  # (B, T, V), or (N, V)
        """The logits of every next token, or of those after the tokens at some places."""
        normed = self._normed(tokens, cu_seqlens, positions, past=past)
        return self.head.logits(normed if places is None else normed.flatten(0, 1)[places], self._tied_weight())

    @functools.cached_property
    def norm_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each block, and last those outside of blocks."""
        blocks = [list(block.parameters()) for block in self.blocks]
        inside = {id(parameter) for block in blocks for parameter in block}
        return [*blocks, [parameter for parameter in self.parameters() if id(parameter) not in inside]]

    def _normed(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None,
        positions: Tensor | None,
        max_seqlen: int | None = None,
        past: Sequence[Past | None] = (),
    ) -> Tensor:  # (B, T, C)
        if cu_seqlens is not None and not torch.compiler.is_compiling():
            # Batches differ in their number of documents: compiled blocks are for any, from the first one on.
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        documents = None if cu_seqlens is None else kernels.document_bounds(cu_seqlens, tokens.numel())
        if self.pads_documents:
            cu_seqlens = max_seqlen = None
        return self.stack(self.embedding(tokens), positions, cu_seqlens, documents, max_seqlen, past)

    def stack(
        self,
        residual: Tensor,  # (B, T, C)
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        documents: Tensor | None,
        max_seqlen: int | None,
        past: Sequence[Past | None],
    ) -> Tensor:  # (B, T, C)
        """All blocks, from the embedding to the last norm: one graph where they are compiled together."""
        normed = kernels.rms_norm(residual, self.first_norm, eps=self.config.norm_eps)
        known = iter(past)
        for length, run in self.units:
            theirs = [*islice(known, length)]
            known_of_all = self.cos, self.sin, positions, cu_seqlens, documents, max_seqlen
            normed, residual = run(normed, residual, *known_of_all, past=theirs)
        return normed

    def _tied_weight(self) -> Tensor | None:
        return self.embedding.weight if self.config.tied_head else None

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Decoder:
        """As torch's, with the rotary table, which no state dict brings."""
        super().to_empty(device=device, recurse=recurse)
        self._build_rotary_table(self.cos.device)
        return self

    def _build_rotary_table(self, device: torch.device | None) -> None:
        model = self.config
        cos, sin = kernels.rotary_table(self.sequence, model.head_dim, theta=model.rope_theta, device=device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Norms 1; matrices truncated normal, those that write to the residual stream narrower with depth.

        A parameter's rows are drawn in blocks, each from a seed of its own, which its name and place determine. So the
        weights do not depend on how many ranks share them, and a rank draws its own rows only.
        """
        into_stream = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            name = plain_name(name)
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                narrow = name.endswith(("attention_out.weight", "down.weight"))
                _truncated_normal_(parameter, into_stream if narrow else self.config.init_std, f"{seed} {name}")


def plain_name(name: str) -> str:
    """A module's or parameter's name without what wrappers that recompute or compile add to it."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


def _truncated_normal_(parameter: Tensor, std: float, key: str) -> None:  # (rows, columns), of which a shard is here
    local, offset = parameter, [0] * parameter.dim()
    if type(parameter).__name__ == "DTensor":  # by name: importing torch.distributed.tensor costs a second
        local, offset = _local(parameter)
    if local.numel() == 0:
        return
    generator = torch.Generator(local.device)
    rows, columns = parameter.shape
    start, stop = offset[0], offset[0] + local.shape[0]
    for first in range(start - start % _INIT_ROWS, stop, _INIT_ROWS):
        digest = hashlib.sha256(f"{key} {first}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:7]))
        block = torch.empty(min(_INIT_ROWS, rows - first), columns, dtype=local.dtype, device=local.device)
        nn.init.trunc_normal_(block, std=std, a=-_CUT * std, b=_CUT * std, generator=generator)
        begin, end = max(first, start), min(first + _INIT_ROWS, stop)
        local[begin - start : end - start] = block[begin - first : end - first, offset[1] : offset[1] + local.shape[1]]


def _local(parameter: Tensor) -> tuple[Tensor, list[int]]:
    """A DTensor's shard, and the place of its first element in the whole."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(parameter, DTensor)
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), list(offset)
