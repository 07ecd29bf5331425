"""The decoder's weights under Transformers' names."""

from collections.abc import Mapping

from torch import Tensor

from fasttrain.config import ModelConfig
from fasttrain.hf.names import parts


def to_huggingface(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The decoder's state dict as Transformers has it. Split projections are views of the packed ones."""
    result: dict[str, Tensor] = {}
    for ours, theirs in parts(model, {name: len(tensor) for name, tensor in state.items()}).items():
        result.update(zip(theirs, state[ours].split(list(theirs.values())), strict=True))
    return result
