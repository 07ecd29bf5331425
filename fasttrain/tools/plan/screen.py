"""A plan on the terminal: tables, and a bar for the memory."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fasttrain.gpus import prices_from
from fasttrain.tools.plan.advice import Option
from fasttrain.tools.plan.estimate import Band, Plan
from fasttrain.units import count, duration, memory_size

COLOURS = {
    "parameters": "blue", "gradients": "magenta", "optimizer": "cyan", "activations": "green", "loss": "yellow",
    "fsdp": "red", "runtime": "white",
}  # fmt: skip
MEANINGS = {
    "parameters": "fp32, this GPU's share",
    "gradients": "fp32, this GPU's share and those being made",
    "optimizer": "fp32 moments, this GPU's share",
    "activations": "kept for backward, and at work",
    "loss": "the chunk of logits and its gradients",
    "fsdp": "gathered weights, gradients on their way",
    "runtime": "context, collectives, fragmentation",
}
PARTS_OF_A_STEP = {
    "matmuls": "matmuls",
    "attention": "attention",
    "streaming": "memory-bound ops",
    "loss": "head and loss",
    "optimizer": "optimizer and loop",
    "exposed": "waiting for communication",
    "launching": "waiting for the host",
}
_BAR = 56


def show(plan: Plan, console: Console, advice: Sequence[str]) -> None:
    """All of it."""
    hardware = plan.hardware
    where = "this machine's CPU" if plan.measured else f"{hardware.gpus} x {hardware.gpu.name}, {hardware.node} a node"
    console.print(f"[bold]{escape(str(plan.settings.out.name))}[/] on {where}, {plan.precision}", highlight=False)
    for line in plan.sizes.lines():
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    console.print()
    _memory(plan, console)
    console.print()
    _time(plan, console)
    if advice:
        console.print("\n[bold]advice[/]")
        for line in advice:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    for line in plan.warnings:
        console.print(f"[yellow]warning:[/] {escape(line)}", highlight=False, soft_wrap=True)


def show_options(options: Sequence[Option], console: Console, title: str) -> None:
    """The best few."""
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    table.add_column("tokens/s per GPU", justify="right")
    table.add_column("MFU", justify="right")
    table.add_column("memory", justify="right")
    table.add_column("days", justify="right")
    table.add_column("settings", overflow="fold")
    for option in options:
        plan = option.plan
        table.add_row(
            f"{plan.speed.rate:,.0f}", f"{plan.speed.mfu:.1%}", memory_size(plan.memory.bytes),
            f"{plan.days.value:,.1f}", str(option) or "as they are",
        )  # fmt: skip
    console.print(table)


def _memory(plan: Plan, console: Console) -> None:
    peak, limit = plan.memory.peak, plan.hardware.memory
    fits = "fits" if plan.fits else "[bold red]does not fit[/]"
    console.print(
        f"[bold]memory[/] {_span(Band(*(b / 2**30 for b in plan.memory_band)), 1)} GiB of {memory_size(limit)}: "
        f"{fits}; the peak is at: {peak.name}",
        highlight=False,
        soft_wrap=True,
    )
    scale = _BAR / max(limit, peak.total)
    bar, used = "", 0
    for part, size in peak.parts.items():
        end = round((sum(list(peak.parts.values())[: list(peak.parts).index(part)]) + size) * scale)
        bar += f"[{COLOURS[part]}]{'█' * max(end - used, 0)}[/]"
        used = max(end, used)
    left = max(round(limit * scale) - used, 0)
    console.print(f"  {bar}{'░' * left}" + ("" if plan.fits else " [bold red]![/]"), highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for part, size in peak.parts.items():
        if size >= 0.001 * peak.total:
            share = size / peak.total
            table.add_row(
                f"  [{COLOURS[part]}]█[/] {part}", f"{memory_size(size):>12}", f"{share:5.0%}", MEANINGS[part]
            )
    console.print(table)


def _time(plan: Plan, console: Console) -> None:
    speed = plan.speed
    how = "measured here" if plan.measured else "predicted"
    console.print(
        f"[bold]speed[/] {_span(plan.rate, 0)} tokens/s per GPU ({how}), MFU {plan.mfu.value:.1%}; a step takes "
        f"{duration(speed.seconds)}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for part, seconds in speed.parts.items():
        share = seconds / speed.seconds
        if share >= 0.001:
            bar = "█" * round(share * 30)
            table.add_row(f"  {PARTS_OF_A_STEP[part]}", f"{seconds:9.3f} s", f"{share:5.1%}", bar)
    console.print(table)
    days = plan.days
    cost = plan.cost
    money = f"; {_span(cost, 0)} USD at {plan.hardware.price:g} per GPU-hour" if cost else ""
    console.print(
        f"[bold]run[/] {count(plan.sizes.tokens)} tokens in {_span(days, 1 if days.value >= 1 else 3)} days, "
        f"{_span(plan.gpu_hours, 0 if plan.gpu_hours.value >= 10 else 2)} GPU-hours{money}",
        highlight=False,
        soft_wrap=True,
    )
    if cost and plan.hardware.price == plan.hardware.gpu.price:
        console.print(f"  price: {prices_from()}; --price overrides", highlight=False, soft_wrap=True)


def _span(band: Band, digits: int) -> str:
    return f"{band.value:,.{digits}f} ({band.low:,.{digits}f} to {band.high:,.{digits}f})"
