"""Advice on what else could be done with the same GPUs: other settings, each with what it gains; the best few; the
largest model that a card can train.

Everything here calls estimate() again with other settings, so that advice can never say what the plan would not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fasttrain import config
from fasttrain.flops import num_parameters
from fasttrain.tools.plan.estimate import Plan, changed, estimate, precision_of
from fasttrain.tools.plan.memory import memory, planned_chunk
from fasttrain.tools.plan.speed import Hardware, collectives, speed, work_of
from fasttrain.units import count, memory_size

RECOMPUTE = ("none", "selective", "full")
USABLE = 0.97  # of the memory that a recommendation may use


@dataclass(frozen=True, kw_only=True)
class Option:
    """Settings to consider, as they are written, and what comes of them."""

    settings: dict[str, str]  # dotted key -> value
    plan: Plan

    def __str__(self) -> str:
        return " ".join(f"--{key} {value}" for key, value in self.settings.items())


def largest_micro(settings: config.Config, hardware: Hardware, *, vocab: int) -> int | None:
    """Sequences of a forward pass that fit, of those that divide a rank's share of the step; None: not even one."""
    share = settings.batch.sequences // hardware.gpus
    fitting = [m for m in _divisors(share) if _fits(changed(settings, batch=dict(micro=m)), hardware, vocab)]
    return max(fitting, default=None)


def remedies(plan: Plan) -> list[str]:
    """For a run that does not fit: what makes it fit, the least costly first."""
    settings, hardware, vocab = plan.settings, plan.hardware, plan.sizes.vocab
    fitting = [
        option for option in options(settings, hardware, vocab=vocab) if option.plan.memory.bytes <= hardware.memory
    ]
    fitting.sort(key=lambda option: (len(option.settings), -option.plan.speed.rate))
    texts = [
        f"{option}: {memory_size(option.plan.memory.bytes)}, {option.plan.speed.rate:,.0f} tokens/s per GPU"
        for option in fitting[:3]
    ]
    if not texts:
        gpus = _enough_gpus(plan)
        if gpus:
            texts.append(f"--gpus {gpus}: no other settings make it fit on {hardware.gpus}")
        else:
            texts.append(
                "take a smaller model, or GPUs with more memory: no number of these and no settings are enough"
            )
    return texts


def advice(plan: Plan) -> list[str]:
    """Sentences, each about one thing, with the expected gain."""
    settings, hardware, vocab = plan.settings, plan.hardware, plan.sizes.vocab
    lines: list[str] = []
    if plan.sizes.contradictions:
        return lines
    micro = largest_micro(settings, hardware, vocab=vocab)
    if micro is not None:
        gain = _gain(plan, batch=dict(micro=micro)) if micro != settings.batch.micro else 0.0
        tail = f" ({gain:+.1%} speed)" if micro != settings.batch.micro else ", which is what is set"
        lines.append(f"the largest batch.micro that fits is {micro}{tail}")
    lines += _about_recomputation(plan)
    lines += _about_sharding(plan)
    lines.append(_about_loss(plan))
    lines += _about_batch(plan)
    return [*lines, about_scaling(plan, scaling(plan))]


def options(settings: config.Config, hardware: Hardware, *, vocab: int) -> Iterator[Option]:
    """Every combination of micro-batch, recomputation and sharding that the batch allows."""
    share = settings.batch.sequences // hardware.gpus
    for micro in _divisors(max(share, 1)):
        if settings.batch.sequences % (micro * hardware.gpus):
            continue
        for recompute in RECOMPUTE:
            for dp_replicate in _replica_counts(hardware):
                for reshard in (True, False):
                    accumulates = share > micro
                    for reduce in ("last", "every") if accumulates and hardware.gpus > 1 else ("last",):
                        values = {
                            "batch.micro": micro, "parallel.recompute": recompute,
                            "parallel.dp_replicate": dp_replicate, "parallel.reshard_after_forward": reshard,
                            "parallel.grad_reduce": reduce,
                        }  # fmt: skip
                        yield _option(settings, hardware, vocab, values)


def search(settings: config.Config, hardware: Hardware, *, vocab: int, best: int = 5) -> list[Option]:
    """The fastest that fit, the one with less memory first where two are as fast."""
    fitting = [o for o in options(settings, hardware, vocab=vocab) if o.plan.memory.bytes <= USABLE * hardware.memory]
    fitting.sort(key=lambda o: (-round(o.plan.speed.rate, -1), o.plan.memory.bytes))
    return fitting[:best]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A model that a card can train, and how."""

    model: config.ModelConfig
    parameters: int
    option: Option


def largest_model(settings: config.Config, hardware: Hardware, *, vocab: int) -> Fit | None:
    """The most parameters that fit, in the proportions of the settings' model, with the settings that train it fastest.

    Width and depth grow together, as in the families that people train: hidden in steps of 64, a layer for every 64
    of hidden up to 32, and more slowly from there.
    """
    low, high, found = 1, 256, None  # hidden / 64
    while low <= high:
        middle = (low + high) // 2
        model = _scaled(settings.model, 64 * middle)
        candidate = changed(settings, model=vars(model))
        if _any_fits(candidate, hardware, vocab):
            found, low = candidate, middle + 1
        else:
            high = middle - 1
    if found is None:
        return None
    (option,) = search(found, hardware, vocab=vocab, best=1)
    return Fit(model=found.model, parameters=num_parameters(found.model, vocab).total, option=option)


def scaling(plan: Plan) -> list[dict[str, float]]:
    """The same model and batch on 1 to 4096 GPUs: tokens per second of all, by sharding; 0 where it cannot run."""
    settings, vocab = plan.settings, plan.sizes.vocab
    rows = []
    for gpus in (2**n for n in range(13)):
        hardware = _resized(plan.hardware, gpus)
        row: dict[str, float] = {"gpus": gpus}
        share = settings.batch.sequences / gpus
        row["too_small"] = float(share < 1)
        micro = max((m for m in _divisors(max(int(share), 1)) if m <= settings.batch.micro), default=1)
        for name, dp_replicate in (("fsdp", 1), ("hsdp", max(gpus // hardware.node, 1))):
            # Where the batch is too small for the GPUs, it grows with them: that is another run
            sequences = settings.batch.sequences if share >= 1 else gpus
            candidate = changed(
                settings,
                batch=dict(micro=1, sequences=sequences),
                parallel=dict(dp_replicate=dp_replicate, reshard_after_forward=True),
            )
            candidate = changed(candidate, batch=dict(micro=micro if sequences % (micro * gpus) == 0 else 1))
            work = work_of(candidate, vocab=vocab, dp_size=gpus, precision=plan.precision, compiled=plan.compiled)
            row[name] = speed(work, hardware).rate * gpus
            row[f"{name}_memory"] = memory(candidate, vocab=vocab, dp_size=gpus, precision=plan.precision).bytes
        row["fsdp_fits"] = float(row["fsdp_memory"] <= hardware.memory)
        row["hsdp_fits"] = float(row["hsdp_memory"] <= hardware.memory)
        rows.append(row)
    return rows


def about_scaling(plan: Plan, rows: Sequence[dict[str, float]]) -> str:
    """Where hybrid sharding wins, and where the batch ends."""
    hybrid = [str(int(row["gpus"])) for row in rows if row["hsdp"] > 1.01 * row["fsdp"] and row["hsdp_fits"]]
    small = next((int(row["gpus"]) for row in rows if row["too_small"]), None)
    text = f"over 1 to {rows[-1]['gpus']:.0f} GPUs, with {plan.settings.batch.sequences} sequences a step: "
    text += f"HSDP beats FSDP on {', '.join(hybrid)} GPUs" if hybrid else "HSDP nowhere beats FSDP"
    if small:
        text += f"; from {small} GPUs on, the batch is too small, and would have to grow with them"
    return text


def _about_recomputation(plan: Plan) -> list[str]:
    """The best of each kind, at its own largest micro-batch."""
    settings, hardware, vocab = plan.settings, plan.hardware, plan.sizes.vocab
    rates = {}
    for recompute in RECOMPUTE:
        candidate = changed(settings, parallel=dict(recompute=recompute))
        micro = largest_micro(candidate, hardware, vocab=vocab)
        if micro is not None:
            candidate = changed(candidate, batch=dict(micro=micro))
            rates[recompute] = (estimate(candidate, hardware, vocab=vocab).speed.rate, micro)
    if not rates:
        return []
    best = max(rates, key=lambda name: (rates[name][0], -RECOMPUTE.index(name)))
    rate, micro = rates[best]
    now = settings.parallel.recompute
    others = ", ".join(
        f"{name} {value / rate - 1:+.1%} (batch.micro {m})" for name, (value, m) in rates.items() if name != best
    )
    worth = "is not worth it" if best == "none" else f"pays: {best}"
    tail = f"; against it {others}" if others else "; nothing else fits"
    change = "" if now == best and micro == settings.batch.micro else f" ({rate / plan.speed.rate - 1:+.1%} from here)"
    return [f"recomputation {worth}, with batch.micro {micro}{change}{tail}"]


def _about_sharding(plan: Plan) -> list[str]:
    settings, hardware, vocab = plan.settings, plan.hardware, plan.sizes.vocab
    if hardware.gpus == 1:
        return []
    found = []
    for dp_replicate in _replica_counts(hardware):
        for reshard in (True, False):
            candidate = changed(settings, parallel=dict(dp_replicate=dp_replicate, reshard_after_forward=reshard))
            other = estimate(candidate, hardware, vocab=vocab)
            if other.fits:
                found.append((other.speed.rate, dp_replicate, reshard))
    if not found:
        return []
    rate, dp_replicate, reshard = max(found)
    groups = f"HSDP, {dp_replicate} groups of {hardware.gpus // dp_replicate} GPUs (parallel.dp_replicate)"
    kind = "FSDP over all GPUs" if dp_replicate == 1 else groups
    held = "" if reshard else ", weights held through a step (parallel.reshard_after_forward False)"
    gain = rate / plan.speed.rate - 1
    work = work_of(settings, vocab=vocab, dp_size=hardware.gpus, precision=plan.precision, compiled=plan.compiled)
    moving = sum(collectives(work, hardware).values())
    share = plan.speed.parts["exposed"] / plan.speed.seconds
    text = (
        f"sharding for these GPUs: {kind}{held} ({gain:+.1%}); as set, a step has {moving:.2f} s of communication, and "
        f"{share:.0%} of the step waits for it"
    )
    return [text]


def _about_loss(plan: Plan) -> str:
    settings, a, vocab = plan.settings, 4 if plan.precision == "fp32" else 2, plan.sizes.vocab
    tokens = settings.batch.micro * settings.data.sequence
    chunk = planned_chunk(tokens, settings.model.hidden, vocab, precision=plan.precision, device="cuda").tokens
    saved = plan.plain_loss.bytes - plan.memory.bytes
    return (
        f"linear cross-entropy takes {chunk:,} of {tokens:,} tokens at a time, {memory_size(chunk * vocab * a)} of "
        f"logits; plain cross-entropy would raise the peak by {memory_size(max(saved, 0))}"
    )


def _about_batch(plan: Plan) -> list[str]:
    """Where more GPUs stop helping."""
    share = plan.sizes.settings.batch.sequences // plan.hardware.gpus
    tokens = share * plan.settings.data.sequence
    if share < 2 and plan.hardware.gpus > 1:
        return [
            f"the batch is as small as it can be for {plan.hardware.gpus} GPUs: {share} sequence, {tokens:,} tokens "
            "each; more GPUs need a larger batch.sequences"
        ]
    return []


def _gain(plan: Plan, **sections: dict[str, int]) -> float:
    other = estimate(changed(plan.settings, **sections), plan.hardware, vocab=plan.sizes.vocab)
    return other.speed.rate / plan.speed.rate - 1


def _option(settings: config.Config, hardware: Hardware, vocab: int, values: dict[str, object]) -> Option:
    sections: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    different = {
        key: str(value)
        for key, value in values.items()
        if getattr(getattr(settings, key.split(".")[0]), key.split(".")[1]) != value
    }
    return Option(settings=different, plan=estimate(changed(settings, **sections), hardware, vocab=vocab))


def _fits(settings: config.Config, hardware: Hardware, vocab: int) -> bool:
    return (
        memory(settings, vocab=vocab, dp_size=hardware.gpus, precision=precision_of(settings.parallel)).bytes
        <= USABLE * hardware.memory
    )


def _any_fits(settings: config.Config, hardware: Hardware, vocab: int) -> bool:
    """With the least memory that settings can bring about."""
    reduce = "every" if settings.batch.sequences > hardware.gpus else "last"
    least = changed(
        settings,
        batch=dict(micro=1),
        parallel=dict(recompute="full", dp_replicate=1, reshard_after_forward=True, grad_reduce=reduce),
    )
    return _fits(least, hardware, vocab)


def _enough_gpus(plan: Plan) -> int | None:
    for n in range(1, 14):
        gpus = 2**n
        if gpus > plan.hardware.gpus:
            settings = changed(plan.settings, batch=dict(micro=1, sequences=max(plan.settings.batch.sequences, gpus)))
            if _any_fits(settings, _resized(plan.hardware, gpus), plan.sizes.vocab):
                return gpus
    return None


def _resized(hardware: Hardware, gpus: int) -> Hardware:
    node = min(max(hardware.node, hardware.gpu.node), gpus)
    return Hardware(
        gpu=hardware.gpu, gpus=gpus, node=node, network=hardware.network, memory=hardware.memory, price=hardware.price
    )  # fmt: skip


def _replica_counts(hardware: Hardware) -> list[int]:
    """1 is FSDP; a group within a node, or of a few nodes, is HSDP."""
    groups = {hardware.node * n for n in (1, 2, 4) if hardware.node * n <= hardware.gpus}
    return sorted({1, *(hardware.gpus // group for group in groups if hardware.gpus % group == 0)})


def _scaled(model: config.ModelConfig, hidden: int) -> config.ModelConfig:
    """As wide, with the proportions of a model."""
    heads = max(hidden // model.head_dim, 1)
    group = model.heads // model.kv_heads
    kv_heads = heads // group if heads % group == 0 else heads
    layers = hidden // 64 if hidden <= 2048 else 32 + (hidden - 2048) // 256
    ffn = -(-round(hidden * model.ffn / model.hidden) // 64) * 64
    return config.ModelConfig(
        **vars(model) | dict(hidden=hidden, heads=heads, kv_heads=kv_heads, layers=max(layers, 2), ffn=ffn)
    )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(max(number, 1)) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def summary_of(fit: Fit) -> str:
    """One line."""
    model = fit.model
    return (
        f"{count(fit.parameters)} parameters: --model.layers {model.layers} --model.hidden {model.hidden} "
        f"--model.heads {model.heads} --model.kv_heads {model.kv_heads} --model.head_dim {model.head_dim} "
        f"--model.ffn {model.ffn}"
    )
