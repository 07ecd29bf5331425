"""A plan on the terminal: tables, and a bar for the memory."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fasttrain.gpus import prices_from
from fasttrain.tools.plan.advice import Option
from fasttrain.tools.plan.estimate import Band, Plan
from fasttrain.units import count, duration, memory_size

MEMORY = {  # part: its colour and meaning
    "parameters": ("blue", "fp32, this GPU's share"),
    "gradients": ("magenta", "fp32, this GPU's share and those being made"),
    "optimizer": ("cyan", "fp32 moments, this GPU's share"),
    "activations": ("green", "kept for backward, and at work"),
    "loss": ("yellow", "the chunk of logits and its gradients"),
    "fsdp": ("red", "gathered weights, gradients on their way"),
    "runtime": ("white", "context, collectives, fragmentation"),
}
PARTS_OF_A_STEP = {
    "blocks": "blocks",
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
    hardware, say = plan.hardware, partial(console.print, highlight=False, soft_wrap=True)
    where = "this machine's CPU" if plan.measured else f"{hardware.gpus} x {hardware.gpu.name}, {hardware.node} a node"
    say(f"[bold]{escape(str(plan.settings.out.name))}[/] on {where}, {plan.precision}")
    for line in plan.sizes.lines():
        say(f"  {line}")
    _memory(plan, say)
    _time(plan, say)
    if advice:
        say("\n[bold]advice[/]")
        for line in advice:
            say(f"  {line}", markup=False)
    for line in plan.warnings:
        say(f"[yellow]warning:[/] {escape(line)}")


def show_options(options: Sequence[Option], console: Console, title: str) -> None:
    """The best few."""
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for figure in ("tokens/s per GPU", "MFU", "memory", "days"):
        table.add_column(figure, justify="right")
    table.add_column("settings", overflow="fold")
    for option in options:
        plan = option.plan
        table.add_row(
            f"{plan.speed.rate:,.0f}", f"{plan.speed.mfu:.1%}", memory_size(plan.memory.bytes),
            f"{plan.days.value:,.1f}", str(option) or "as they are",
        )  # fmt: skip
    console.print(table)


def _memory(plan: Plan, say: Callable[..., None]) -> None:
    peak, limit = plan.memory.peak, plan.hardware.memory
    fits = "fits" if plan.fits else "[bold red]does not fit[/]"
    gib = f"{_span(plan.memory_gib, 1)} GiB of {memory_size(limit)}"
    say(f"\n[bold]memory[/] {gib}: {fits}; the peak is at: {peak.name}")
    scale = _BAR / max(limit, peak.total)
    bar, used = "", 0
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for (part, size), total in zip(peak.parts.items(), accumulate(peak.parts.values()), strict=True):
        (colour, meaning), end = MEMORY[part], round(total * scale)
        bar += f"[{colour}]{'█' * (end - used)}[/]"
        used = end
        if size >= 0.001 * peak.total:
            share = f"{size / peak.total:5.0%}"
            table.add_row(f"  [{colour}]█[/] {part}", f"{memory_size(size):>12}", share, meaning)
    left = max(round(limit * scale) - used, 0)
    say(f"  {bar}{'░' * left}" + ("" if plan.fits else " [bold red]![/]"))
    say(table, soft_wrap=False)


def _time(plan: Plan, say: Callable[..., None]) -> None:
    speed, days, cost = plan.speed, plan.days, plan.cost
    how = "measured here" if plan.measured else "predicted"
    rate, step = _span(plan.rate, 0), duration(speed.seconds)
    say(f"\n[bold]speed[/] {rate} tokens/s per GPU ({how}), MFU {plan.mfu.value:.1%}; a step takes {step}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for part, seconds in speed.parts.items():
        share = seconds / speed.seconds
        if share >= 0.001:
            bar = "█" * round(share * 30)
            table.add_row(f"  {PARTS_OF_A_STEP[part]}", f"{seconds:9.3f} s", f"{share:5.1%}", bar)
    say(table, soft_wrap=False)
    if speed.parts.get("launching"):
        say(f"  [yellow]the host is the bottleneck[/]: {speed.host:.3f} s a step to call ops; raise batch.micro")
    if plan.published:
        say(f"  {escape(plan.published)}")
    hours = _span(plan.gpu_hours, 0 if plan.gpu_hours.value >= 10 else 2)
    money = f"; {_span(cost, 0)} USD at {plan.hardware.price:g} per GPU-hour" if cost else ""
    span = _span(days, 1 if days.value >= 1 else 3)
    say(f"[bold]run[/] {count(plan.sizes.tokens)} tokens in {span} days, {hours} GPU-hours{money}")
    if cost and plan.hardware.price == plan.hardware.gpu.price:
        say(f"  price: {prices_from()}; --price overrides")


def _span(band: Band, digits: int) -> str:
    return f"{band.value:,.{digits}f} ({band.range(digits)})"
