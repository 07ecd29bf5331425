"""A plan as a page: one file, no network, with the memory through a step and the speed over numbers of GPUs."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from fasttrain.fs import write_file
from fasttrain.gpus import prices_from
from fasttrain.tools.plan.advice import about_scaling, advice, scaling
from fasttrain.tools.plan.estimate import Plan
from fasttrain.tools.plan.memory import PARTS, Moment
from fasttrain.tools.plan.screen import MEMORY, PARTS_OF_A_STEP
from fasttrain.tools.webpage import COLOURS, Axis, Series, chart, legend, mark, page, table
from fasttrain.units import count, memory_size

WIDTH, HEIGHT = 860, 330
PART_COLOURS = dict(zip(PARTS, COLOURS[:6] + COLOURS[7:], strict=True))  # grey: what the runtime takes


def write_page(plan: Plan, path: Path, problems: Sequence[str] = ()) -> None:
    where = "this machine's CPU" if plan.measured else f"{plan.hardware.gpus} x {plan.hardware.gpu.name}"
    sections = [
        f"<h1>{escape(f'{plan.settings.out.name} on {where}')}</h1>",
        *(f'<p class="problem">{escape(problem)}</p>' for problem in problems),
        *(f'<p class="warning">{escape(warning)}</p>' for warning in plan.warnings),
        _tiles(plan),
        _list(plan.sizes.lines()),
        _memory(plan),
        _step(plan),
    ]
    how = "The speed was measured on this machine, op by op."
    if not plan.measured:  # the CPU is one hardware: there is nothing to scale over, and no table to advise from
        sections.append(_scaling(plan))
        if plan.fits and (sentences := advice(plan)[:-1]):  # the last is above the chart
            sections.append(f"<h2>Advice</h2>{_list(sentences)}")
        how = (
            "Speed, days and cost are predicted, by a model that is fitted to published runs; the bands are the error "
            "that it has on runs that it was not fitted to."
        )
    price = f" Prices: {escape(prices_from())}." if plan.cost else ""
    sections.append(f"<footer>{how}{price}</footer>")
    write_file(path, [page(f"{plan.settings.out.name}: plan", sections, width=900)])


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _tiles(plan: Plan) -> str:
    days, cost, limit = plan.days, plan.cost, memory_size(plan.hardware.memory)
    tiles = [
        ("parameters", count(plan.sizes.parameters.total), f"{plan.sizes.parameters.total:,}"),
        ("tokens", count(plan.sizes.tokens), f"{plan.sizes.tokens_per_parameter:,.1f} per parameter"),
        ("memory of a GPU", memory_size(plan.memory.bytes), f"{plan.memory_gib.range(1)} of {limit}"),
        ("tokens/s per GPU", f"{plan.rate.value:,.0f}", f"{plan.rate.range(0)}; MFU {plan.mfu.value:.1%}"),
        ("days", f"{days.value:,.3g}", f"{days.low:,.3g} to {days.high:,.3g}; {plan.gpu_hours.value:,.0f} GPU-hours"),
    ]
    if cost:
        tiles.append(("USD", f"{cost.value:,.0f}", f"{cost.range(0)} at {plan.hardware.price:g} an hour"))
    cells = (f"<div><small>{a}</small><b>{b}</b><small>{c}</small></div>" for a, b, c in tiles)
    return f'<section class="tiles">{"".join(cells)}</section>'


def _memory(plan: Plan) -> str:
    """What a GPU holds, by part, from one end of a step to the other."""
    moments, peak, limit = plan.memory.moments, plan.memory.peak, plan.hardware.memory
    name, unit = ("GiB", 2**30) if peak.total >= 2**30 else ("MiB", 2**20)
    series: list[Series] = []
    below = [0.0] * len(moments)
    for part, colour in PART_COLOURS.items():
        above = [height + moment.parts[part] / unit for height, moment in zip(below, moments, strict=True)]
        series.append(Series(part, [*enumerate(above), *reversed([*enumerate(below)])], colour, draw="area"))
        below = above
    if limit <= 1.68 * peak.total:
        ends = [(0.0, limit / unit), (len(moments) - 1.0, limit / unit)]
        series.append(Series(f"{memory_size(limit)} of the GPU", ends, "var(--ink)", draw="line"))
    names = [moment.name for moment in moments]
    first = names.index("forward of block 1"), names.index(f"backward of block {plan.settings.model.layers}")
    phases = dict(zip((*first, len(names) - 1), ("forward", "backward", "optimizer"), strict=True))
    title = "Memory of a GPU through a step"
    drawn = chart(
        title, series, Axis("", lambda at: phases[int(at)], log=False, ticks=[*phases], pad=0),
        Axis(name, lambda value: f"{value:g}", log=False), width=WIDTH, height=HEIGHT, here=moments.index(peak),
        columns=[(at, _words(moment)) for at, moment in enumerate(moments)],
    )  # fmt: skip
    fits = "It fits." if plan.fits else "It does not fit."
    rows = []
    for part, size in peak.parts.items():
        name = f"{mark(PART_COLOURS[part], square=True)}{part}"
        rows.append((name, memory_size(size), f"{size / peak.total:.0%}", MEMORY[part][1]))
    about = f"The peak, {memory_size(peak.total)} of {memory_size(limit)}, is at: {peak.name}. {fits}"
    return f"<h2>{title}</h2><p>{about}</p>{drawn}{table(rows)}"


def _words(moment: Moment) -> str:
    parts = [f"{part}: {memory_size(size)}" for part, size in moment.parts.items() if size]
    return "\n".join([f"{moment.name}: {memory_size(moment.total)}", *parts])


def _step(plan: Plan) -> str:
    """Where its time goes."""
    shares = {part: seconds / plan.speed.seconds for part, seconds in plan.speed.parts.items() if seconds > 0}
    colours = dict(zip(shares, COLOURS, strict=False))
    bar, rows = "", []
    for part, share in shares.items():
        bar += f'<span style="width:{share:.2%};background:{colours[part]}"></span>'
        name = f"{mark(colours[part], square=True)}{PARTS_OF_A_STEP[part]}"
        rows.append((name, f"{plan.speed.parts[part]:.3f} s", f"{share:.1%}"))
    return f'<h2>Where the time of a step goes</h2><div class="bar">{bar}</div>{table(rows)}'


def _scaling(plan: Plan) -> str:
    """Tokens per second and GPU: what is lost to communication shows as a fall."""
    rows = scaling(plan)
    small = next((i for i, row in enumerate(rows) if row["too_small"]), len(rows))  # from here on, the batch is
    series: list[Series] = []
    for name, colour in (("fsdp", COLOURS[0]), ("hsdp", COLOURS[1])):
        points = [(row["gpus"], row[name] / row["gpus"]) for row in rows]
        series.append(Series("", points[:small], colour, draw="line"))
        series.append(Series("", points[small - 1 :], colour, draw="dashes"))
        for row, point in zip(rows, points, strict=True):
            series.append(Series("", [point], colour, draw="marks", hollow=not row[f"{name}_fits"]))
    key = [
        Series("FSDP", (), COLOURS[0]),
        Series("HSDP, a node each", (), COLOURS[1]),
        Series("does not fit; dashed: the batch grows with the GPUs", (), "var(--soft)", hollow=True),
    ]
    gpus = [row["gpus"] for row in rows]
    drawn = chart(
        "More GPUs, fewer GPUs", series, Axis("GPUs", lambda number: f"{number:g}", ticks=gpus),
        Axis("tokens/s per GPU", count, log=False), width=WIDTH, height=HEIGHT,
        here=plan.hardware.gpus if plan.hardware.gpus in gpus else None,
        columns=[(row["gpus"], _words_of_scaling(row)) for row in rows],
    )  # fmt: skip
    return f"<h2>More GPUs, fewer GPUs</h2><p>{escape(about_scaling(plan, rows))}</p>{drawn}{legend(key)}"


def _words_of_scaling(row: dict[str, float]) -> str:
    lines = [f"{row['gpus']:g} GPUs"]
    for name in ("fsdp", "hsdp"):
        fits = "" if row[f"{name}_fits"] else ", does not fit"
        rate, size = row[name] / row["gpus"], memory_size(row[f"{name}_memory"])
        lines.append(f"{name.upper()}: {rate:,.0f} tokens/s per GPU, {count(row[name])} in all, {size}{fits}")
    return "\n".join(lines)
