"""What a checkpoint holds of a run: weights, optimizer state (moments and counts of steps), and the loss scale of fp16.

Tensors are named as in the model, `model.blocks.0.qkv.weight` and `optimizer.blocks.0.qkv.weight.exp_avg`, and DTensors
know their place in the whole, so that any number of ranks can read what any other number wrote. Not here are

- learning rates and other settings: they come from the configuration of the run, anew at every step;
- random state and the position in the data: functions of seed, step and rank.

torch's get_optimizer_state_dict is not used. Asked about an optimizer that has no state yet (all its steps so far were
skipped for an infinite gradient, say), it takes a step to get one: from then on AdamW counts one step too many, only
because somebody saved. And what it restores includes the settings.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fasttrain.checkpoint.committed import Checkpoint
from fasttrain.checkpoint.metadata import read_metadata
from fasttrain.distributed.collectives import RanksFailed, on_all
from fasttrain.model import plain_name

_SCALE = ("scale", "_growth_tracker")  # of a scaler's state dict; the rest of it are settings
_SHOWN = 3  # names in an error


def captured(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of a run by name: its own ones, no copies."""
    state = _weights(model)
    for name, parameter in _parameters(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            assert isinstance(value, Tensor), f"{type(optimizer).__name__}: {key} of {name} is a {type(value).__name__}"
            state[f"optimizer.{name}.{key}"] = value
    return state


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def not_finite(state: Mapping[str, Tensor]) -> list[str]:
    """Names of the weights that have a NaN or an infinity on this rank."""
    weights = {name: local(tensor) for name, tensor in state.items() if name.startswith("model.")}
    ends = {name: weight.aminmax() for name, weight in weights.items() if weight.numel()}
    return [name for name, (low, high) in ends.items() if not (low.isfinite() and high.isfinite())]


def check_finite(state: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Raise if a tensor of a checkpoint is not finite: a model is of no use then, however intact its files are."""
    if bad := not_finite(state):
        raise ValueError(f"checkpoint: {bad[0]} of {checkpoint.path} has values that are not finite; use another")


def verify_weights(checkpoint: Checkpoint) -> None:
    """Raise unless all weights are finite; one is read at a time."""
    reader = TensorReader(checkpoint)
    for name, tensor in reader.tensors.items():
        if name.startswith("model."):
            state = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype)}
            load(checkpoint, state, None, reader)
            check_finite(state, checkpoint)


def scale_of(scaler: torch.amp.GradScaler) -> dict[str, float]:
    """Empty without fp16."""
    state = scaler.state_dict()
    return {key: state[key] for key in _SCALE if key in state}


def restore(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,  # None: only weights are wanted
    scaler: torch.amp.GradScaler | None = None,
    *,
    group: dist.ProcessGroup | None = None,  # None: of this process alone
) -> dict[str, Any]:
    """Give model, optimizer and scaler the state that was saved; the metadata that were saved with it.

    All ranks of `group` call it. Checksums are not looked at again: newest_valid or checkpoint.verify have done that.
    """
    saved, weights = _fitting_tensors(checkpoint, model, optimizer), _weights(model)
    moments = {} if optimizer is None else _empty_optimizer_state(_parameters(model), saved)
    load(checkpoint, weights | moments, group)  # weights are the model's own: they are in place
    if optimizer is not None:
        _set_optimizer_state(optimizer, _parameters(model), moments)
    if scaler is not None and scaler.is_enabled() and checkpoint.scaler:
        scaler.load_state_dict(scaler.state_dict() | checkpoint.scaler)
    return checkpoint.metadata


def _fitting_tensors(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, TensorStorageMetadata]:
    """What a checkpoint holds, by name; raise unless model and optimizer have a place for all of it."""
    if optimizer is not None and type(optimizer).__name__ != checkpoint.optimizer:
        raise ValueError(
            f"checkpoint: {checkpoint.path} was saved with {checkpoint.optimizer}, whose moments "
            f"{type(optimizer).__name__} cannot use; resume with the optim.kind of the run"
        )
    saved, parameters = saved_tensors(checkpoint), _parameters(model)
    _check_model(checkpoint, {name: tensor.shape for name, tensor in _weights(model).items()}, saved)
    for name in saved if optimizer is not None else ():
        of = name.removeprefix("optimizer.").rpartition(".")[0]
        if name.startswith("optimizer.") and of not in parameters:
            raise ValueError(f"checkpoint: {checkpoint.path} holds {name}, and the model has no {of}; it is of another")
    return saved


def misfit(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Why restore would refuse a checkpoint; empty: it would not."""
    try:
        _fitting_tensors(checkpoint, model, optimizer)
    except ValueError as error:
        return str(error)
    return ""


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items()}  # type: ignore[misc]


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """By the names that get_model_state_dict uses."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


class TensorReader(dcp.FileSystemReader):
    """The one door to a checkpoint's tensors; reads the metadata once, since those of many ranks are long."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path)
        self._metadata = read_metadata(checkpoint.path, checkpoint.files)

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return self._metadata.state_dict_metadata  # type: ignore[return-value]

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        assert self._metadata.storage_meta
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def saved_tensors(checkpoint: Checkpoint) -> dict[str, TensorStorageMetadata]:
    """What a checkpoint holds, by name."""
    return TensorReader(checkpoint).tensors


def _empty_optimizer_state(parameters: dict[str, Tensor], saved: dict[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """A tensor for each that was saved of the optimizer, sharded as its parameter is; counts of steps are whole."""
    empty = {}
    for full_name, tensor in saved.items():
        kind, _, rest = full_name.partition(".")
        if kind == "optimizer":
            name, dtype = rest.rpartition(".")[0], tensor.properties.dtype
            parameter = parameters[name]
            shape = parameter if tensor.size == parameter.shape else torch.empty(tensor.size)
            empty[full_name] = torch.empty_like(shape, dtype=dtype, requires_grad=False)
    return empty


def load(
    checkpoint: Checkpoint,
    state: dict[str, Any],
    group: dist.ProcessGroup | None,
    reader: TensorReader | None = None,  # None: a new one
) -> None:
    """Fill the tensors of a state with what was saved under their names. All ranks of `group` call it."""

    def read() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be without a group
            dcp.load(
                state,
                checkpoint_id=checkpoint.path,
                storage_reader=reader or TensorReader(checkpoint),
                process_group=group,
                no_dist=group is None,
            )

    try:
        on_all(group, read)
    except RanksFailed as error:
        text = f"{checkpoint.path} could not be loaded ({error}); verify it, or resume from an earlier one"
        raise ValueError(f"checkpoint: {text}") from None


def _set_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: dict[str, Tensor], moments: dict[str, Tensor]
) -> None:
    """Through load_state_dict, which knows on what device a count of steps belongs; settings stay as they are."""
    state = optimizer.state_dict()
    names = {parameter: name for name, parameter in parameters.items()}
    numbers = {
        names[parameter]: number
        for group, numbered in zip(optimizer.param_groups, state["param_groups"], strict=True)
        for parameter, number in zip(group["params"], numbered["params"], strict=True)
    }
    state["state"] = {}
    for full_name, tensor in moments.items():
        name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
        state["state"].setdefault(numbers[name], {})[key] = tensor
    optimizer.load_state_dict(state)


def _check_model(
    checkpoint: Checkpoint, shapes: dict[str, torch.Size], saved: dict[str, TensorStorageMetadata]
) -> None:
    found = {name: tensor.size for name, tensor in saved.items() if name.startswith("model.")}
    differences = [
        f"{name.removeprefix('model.')} is {_shape(found.get(name))} there and {_shape(shapes.get(name))} in the model"
        for name in (found | shapes)
        if found.get(name) != shapes.get(name)
    ]
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise ValueError(
            f"checkpoint: {checkpoint.path} is of another model: {', '.join(differences[:_SHOWN])}{more}; "
            "use the model section of the run that saved it"
        )


def _shape(size: torch.Size | None) -> str:
    return "absent" if size is None else str(tuple(size))
