"""The optimizers: what builds each, and what it needs. No torch, since the configuration and `plan` read it too."""

from typing import Literal, NamedTuple

OptimizerKind = Literal["adamw", "muon"]
BATCH = 2**26  # elements of matrices that Muon works on at once on a GPU: fewer launches, for workspace


class OptimizerRow(NamedTuple):
    """What the rest of the program knows of an optimizer."""

    module: str  # with make(model, optim, device), and settings(optim, group): a group's options at the peak
    matrix_bytes: int  # of state, for each element of the matrices of blocks
    other_bytes: int  # and for each other parameter
    whole_matrices: int = 0  # of a batch's largest, that an update holds; on several ranks half as much more
    matrix_flops: int = 0  # of an update, for each element of a matrix and each of its rows or columns, the fewer


OPTIMIZERS: dict[OptimizerKind, OptimizerRow] = {
    "adamw": OptimizerRow("fasttrain.optim.adamw", matrix_bytes=8, other_bytes=8),
    # It gathers matrices and iterates on them, with five of their size: 5 times 2 M^2 N + M^3 multiply-adds
    "muon": OptimizerRow("fasttrain.optim.muon", matrix_bytes=4, other_bytes=8, whole_matrices=7, matrix_flops=30),
}
