"""fasttrain plan: what a run will be, before anyone pays for it.

Takes a recipe or configuration as `fasttrain train` does, with any of its options (--model.layers 24), and a GPU type.
Says sizes, memory, speed, days and cost; fails on what contradicts itself and on what does not fit. Needs no GPU.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from fasttrain.bounds import Bounds
from fasttrain.cli.options import command, flag, number, option
from fasttrain.config import Config
from fasttrain.fs import free_bytes
from fasttrain.gpus import find_gpu, gpus
from fasttrain.tools.plan.advice import advice, largest_model, remedies, scaling, search, summary_of
from fasttrain.tools.plan.estimate import Plan, estimate
from fasttrain.tools.plan.page import write_page
from fasttrain.tools.plan.screen import show, show_options
from fasttrain.tools.plan.sizes import Stated, dataset_tokens, sizes, stated_size, vocab_of
from fasttrain.tools.plan.speed import Hardware
from fasttrain.units import memory_size, parse_bytes, parse_count

SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")
CARD = 0.98 * 2**30 / 1e9  # bytes that a process gets of each GB that a card is sold with


@command(
    "plan",
    __doc__,
    option("--gpu", f"{', '.join(gpus())}, or cpu: this machine, measured", metavar="NAME"),
    number("--gpus", "how many", Bounds(1, 10**6), default=1),
    number("--gpus-per-node", "default: as the usual node has", Bounds(1, 10**6)),
    number("--network", "Gbit/s of a node; default: of the usual node", Bounds(0.001, 10**6), float, metavar="GBIT"),
    number("--price", "per GPU-hour; default: the table's", Bounds(0, 10**6), float, metavar="USD"),
    option("--size", "parameters that the model is said to have, as 550m", metavar="N"),
    option("--tokens", "tokens that the run is said to see, as 12.8B", type=parse_count, metavar="N"),
    option("--dataset-tokens", "tokens of the dataset, if it is not here", type=parse_count, metavar="N"),
    option(
        "--disk", "for checkpoints, as 10TB; default: what is free where --out exists", type=parse_bytes, metavar="SIZE"
    ),
    flag("--search", "try all combinations of settings, print the best few"),
    option("--fit", "the largest model, and the best settings, for a card of so much memory, as 32GB", metavar="SIZE"),
    flag("--json", "for scripts"),
    option("--html", "write a page with the memory timeline and scaling curve", type=Path, metavar="FILE"),
    takes_settings=True,
)
def main(options: argparse.Namespace) -> int:
    """Exit code 0: it can be; 1: contradictions, or it does not fit; 2: a mistake in the command."""
    plan = _plan(options, options.settings)
    problems = _problems(plan)
    if options.html is not None:
        write_page(plan, options.html, problems)
    if options.json:
        print(json.dumps(_answer(plan, options) | {"contradictions": problems}, indent=1))
    else:
        _show(plan, options)
    for problem in problems:
        print(f"fasttrain plan: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _problems(plan: Plan) -> list[str]:
    """Contradictions, and memory that is not there, with what to do about it."""
    if plan.fits:
        return list(plan.contradictions)
    remedy = "; or ".join(remedies(plan)) if _has_advice(plan) else "lower batch.micro, or make the model smaller"
    needed, limit = memory_size(plan.memory.bytes), memory_size(plan.hardware.memory)
    return [*plan.contradictions, f"{needed} do not fit in {limit} of a {plan.hardware.gpu.name}; {remedy}"]


def _has_advice(plan: Plan) -> bool:
    return not plan.contradictions and not plan.measured


def _answer(plan: Plan, options: argparse.Namespace) -> dict[str, object]:
    """The plan for scripts, and what else was asked for."""
    answer = plan.json() | ({} if plan.measured else {"scaling": scaling(plan)})
    settings, hardware, vocab = plan.settings, plan.hardware, plan.sizes.vocab
    if options.search and _has_advice(plan):
        found = search(settings, hardware, vocab=vocab)
        answer["search"] = [{"settings": option.settings} | _figures(option.plan) for option in found]
    if options.fit is not None and not plan.contradictions and (fit := largest_model(settings, hardware, vocab=vocab)):
        model = {name: getattr(fit.model, name) for name in SHAPE}
        largest = {"parameters": fit.parameters, "model": model, "settings": fit.option.settings}
        answer["fit"] = largest | _figures(fit.option.plan)
    return answer


def _show(plan: Plan, options: argparse.Namespace) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    settings, hardware, vocab = plan.settings, plan.hardware, plan.sizes.vocab
    show(plan, console, advice(plan) if _has_advice(plan) and plan.fits else [])
    if options.search and _has_advice(plan):
        show_options(search(settings, hardware, vocab=vocab), console, "the best that fit")
    if options.fit is None or plan.contradictions:
        return
    if best := search(settings, hardware, vocab=vocab, best=3):
        show_options(best, console, f"the best settings for this model in {memory_size(hardware.memory)}")
    fit = largest_model(settings, hardware, vocab=vocab)
    if fit is None:
        console.print(f"no model of these proportions fits in {memory_size(hardware.memory)}")
        return
    show_options([fit.option], console, f"the largest model in these proportions: {summary_of(fit)}")
    tokens = 20 * fit.parameters
    days = tokens / (fit.option.plan.speed.rate * hardware.gpus) / 86_400
    console.print(
        f"  20 tokens per parameter are {tokens / 1e9:,.1f}B, {days:,.0f} days on {hardware.gpus} {hardware.gpu.name}",
        highlight=False,
    )


def _plan(options: argparse.Namespace, settings: Config) -> Plan:
    hardware, vocab, stated = _hardware(options), vocab_of(settings), _stated(options, settings)
    if options.gpu != "cpu":
        return estimate(settings, hardware, vocab=vocab, stated=stated)
    import torch

    import fasttrain.train  # noqa: F401  what a run loads before anything else
    from fasttrain.distributed.parallelize import should_compile
    from fasttrain.tools.plan.cpu import estimate_on_cpu, resident_memory

    runtime: Any = SimpleNamespace(device=torch.device("cpu"))
    compiled, _ = should_compile(settings.parallel, runtime, sizes(settings, vocab=vocab).flops)
    return estimate_on_cpu(settings, vocab=vocab, process=resident_memory(), stated=stated, compiled=compiled)


def _hardware(options: argparse.Namespace) -> Hardware:
    if options.gpu == "cpu":
        if options.gpus != 1:
            raise ValueError(f"--gpus {options.gpus}: cpu is this machine, and one rank; remove --gpus")
        from fasttrain.tools.plan.cpu import cpu_hardware

        return cpu_hardware()
    memory, name = None, options.gpu
    if options.fit is not None:
        memory = parse_bytes(options.fit) * (1.0 if "i" in options.fit.lower() else CARD)
    if memory and not name:  # the GPU whose memory is nearest to so much
        name = min(gpus().values(), key=lambda gpu: (round(abs(gpu.memory / memory - 1), 1), -gpu.half)).name
    if name is None:
        raise ValueError(f"--gpu is required; one of {', '.join(gpus())}, or cpu")
    network = options.network * 1e9 / 8 if options.network else None
    node = min(options.gpus_per_node, options.gpus) if options.gpus_per_node else None
    return Hardware.of(find_gpu(name), options.gpus, node=node, network=network, memory=memory, price=options.price)


def _stated(options: argparse.Namespace, settings: Config) -> Stated:
    size, size_from = None, ""
    if options.size:
        size, size_from = (options.size, parse_count(options.size)), "--size"
    else:  # a name may have one in it
        for name, origin in ((options.recipe, "--recipe"), (settings.out.name, f"--out {settings.out}")):
            if found := stated_size(name):
                size, size_from = found, origin
    disk, disk_from = options.disk, "--disk"
    if disk is None and (options.gpu == "cpu" or settings.out.exists()):  # the run is to be here
        disk, disk_from = free_bytes(settings.out), str(settings.out)
    return Stated(
        size=size,
        size_from=size_from,
        size_is_a_name=not options.size,
        tokens=options.tokens,
        dataset={"": options.dataset_tokens} if options.dataset_tokens else dataset_tokens(settings),
        disk=disk,
        disk_from=disk_from,
    )


def _figures(plan: Plan) -> dict[str, object]:
    keys = ("memory_gib", "tokens_per_second_per_gpu", "mfu", "days", "cost_usd")
    return {key: value for key, value in plan.json().items() if key in keys}
