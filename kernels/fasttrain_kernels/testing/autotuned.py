"""Autotuned kernels without a device to measure on: one of their configurations runs."""

from __future__ import annotations

from typing import Any

from triton.runtime.autotuner import Autotuner


def run_configuration(autotuner: Autotuner, index: int, who: str, *args: Any, **kwargs: Any) -> Any:
    """Run the configuration of this index, of those that the kernel's pruning leaves."""
    autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
    configs = autotuner.prune_configs(kwargs) if len(autotuner.configs) > 1 else autotuner.configs
    if not 0 <= index < len(configs):
        raise ValueError(f"{who}: config {index} of a kernel with {len(configs)} configurations")
    chosen = configs[index]
    everything = {**autotuner.nargs, **kwargs, **chosen.all_kwargs()}
    if chosen.pre_hook is not None:
        chosen.pre_hook(everything)
    autotuner.pre_hook(everything, reset_only=True)
    autotuner.nargs = None
    return autotuner.fn.run(*args, **kwargs, **chosen.all_kwargs())
