"""How large a decoder is and what a token of its training costs, in closed form: no model is built, and no torch.

C hidden, H heads, D head_dim, F ffn, L layers, T tokens of a sequence, V vocabulary.
"""

from typing import NamedTuple

from fasttrain import config
from fasttrain.optimizers import OPTIMIZERS, OptimizerKind

# Seconds of the host to call the ops of a block's forward pass, by device and whether it is compiled: about ten fused
# ops or thirty on a GPU (a rule of thumb). Backward takes twice that.
HOST_SECONDS = {("cuda", True): 60e-6, ("cuda", False): 200e-6, ("cpu", True): 150e-6, ("cpu", False): 400e-6}
HOST_SECONDS |= {("mps", compiled): HOST_SECONDS["cpu", compiled] for compiled in (True, False)}  # nobody has measured


class Parameters(NamedTuple):
    """How many parameters a decoder has. A tied head is the embedding, and is not counted again."""

    embedding: int
    head: int  # 0 when tied
    blocks: int
    total: int

    @property
    def non_embedding(self) -> int:
        """Without the tables of the vocabulary, as scaling laws count."""
        return self.total - self.embedding - self.head


def num_parameters(model: config.ModelConfig, vocab: int) -> Parameters:
    """In closed form: no model is built."""
    table = vocab * model.hidden
    norms = 2 * model.hidden + (2 * model.head_dim if model.qk_norm else 0)
    blocks = model.layers * (block_matrices(model) + norms)
    head = 0 if model.tied_head else table
    return Parameters(embedding=table, head=head, blocks=blocks, total=table + model.hidden + blocks + head)


def optimizer_bytes(model: config.ModelConfig, vocab: int, kind: OptimizerKind) -> int:
    """What an optimizer keeps of all parameters."""
    row, matrices = OPTIMIZERS[kind], model.layers * block_matrices(model)
    return row.matrix_bytes * matrices + row.other_bytes * (num_parameters(model, vocab).total - matrices)


def state_bytes(model: config.ModelConfig, vocab: int, kind: OptimizerKind) -> int:
    """What a checkpoint holds: weights in fp32, and the optimizer's state."""
    return 4 * num_parameters(model, vocab).total + optimizer_bytes(model, vocab, kind)


def flops_per_token(model: config.ModelConfig, vocab: int, sequence: int) -> int:
    """Of a training step, as published MFUs count them (PaLM, appendix B): 6 N + 12 L H D T.

    N are the elements of matrices that multiply activations, the head among them, tied or not; the embedding, a
    look-up, is not. Attention counts as if every token saw the whole sequence: neither the causal mask nor documents
    lower it. Nor do norms, the softmax or recomputed activations raise it.
    """
    N = model.layers * block_matrices(model) + vocab * model.hidden
    return 6 * N + 12 * model.layers * model.heads * model.head_dim * sequence


def block_matrices(model: config.ModelConfig) -> int:
    """Elements of the matrices of a block."""
    return sum(K * N for K, N in block_shapes(model))


def block_shapes(model: config.ModelConfig) -> list[tuple[int, int]]:
    """The matrices of a block, as (inputs, outputs): qkv, out, gate_up, down."""
    C, D, F = model.hidden, model.head_dim, model.ffn
    return [(C, (model.heads + 2 * model.kv_heads) * D), (model.heads * D, C), (C, 2 * F), (F, C)]
