"""Advice on what else could be done with the same GPUs: other settings, each with what it gains; the best few; the
largest model that a card can train.

Everything here calls estimate() again with other settings, so that advice can never say what the plan would not.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product, takewhile
from typing import Any

from fasttrain import config
from fasttrain.flops import num_parameters
from fasttrain.tools.plan.estimate import Plan, changed, estimate
from fasttrain.tools.plan.memory import memory, planned_chunk
from fasttrain.tools.plan.speed import Hardware, collectives, speed, work_of
from fasttrain.units import count, memory_size
from fasttrain_kernels.ops.attention import capabilities

RECOMPUTE = ("none", "selective", "full")
BESIDE = 1.1  # of tensors, what the allocator takes of a plan that it is not played for
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
    possible = reversed(_divisors(settings.batch.sequences // hardware.gpus))
    return next((m for m in possible if _fits(changed(settings, batch=dict(micro=m)), hardware, vocab)), None)


def remedies(plan: Plan) -> list[str]:
    """For a run that does not fit: what makes it fit, the least costly first."""
    found = sorted(
        options(plan.settings, plan.hardware, vocab=plan.sizes.vocab),
        key=lambda option: (len(option.settings), -option.plan.speed.rate),
    )
    if fitting := list(islice((o for o in found if o.plan.fits), 3)):
        rates = [f"{o.plan.speed.rate:,.0f} tokens/s per GPU" for o in fitting]
        return [f"{o}: {memory_size(o.plan.memory.bytes)}, {rate}" for o, rate in zip(fitting, rates, strict=True)]
    if gpus := _enough_gpus(plan):
        return [f"--gpus {gpus}: no other settings make it fit on {plan.hardware.gpus}"]
    return ["take a smaller model, or GPUs with more memory: no number of these and no settings are enough"]


def advice(plan: Plan) -> list[str]:
    """Sentences, each about one thing, with the expected gain."""
    if plan.sizes.contradictions:
        return []
    about = (_about_micro, _about_attention, _about_recomputation, _about_sharding, _about_loss, _about_batch)
    return [*filter(None, (of(plan) for of in about)), about_scaling(plan, scaling(plan))]


def options(settings: config.Config, hardware: Hardware, *, vocab: int) -> Iterator[Option]:
    """Every combination of micro-batch, recomputation and sharding that the batch allows."""
    share, rest = divmod(settings.batch.sequences, hardware.gpus)
    for micro in _divisors(share) if not rest else ():
        reduces = ("last", "every") if share > micro and hardware.gpus > 1 else ("last",)
        for values in product(RECOMPUTE, _replica_counts(hardware), (True, False), reduces):
            names = ("recompute", "dp_replicate", "reshard_after_forward", "grad_reduce")
            parallel = dict(zip(names, values, strict=True))
            sections: dict[str, dict[str, Any]] = dict(batch=dict(micro=micro), parallel=parallel)
            different = {
                f"{section}.{name}": str(value)
                for section, changes in sections.items()
                for name, value in changes.items()
                if getattr(getattr(settings, section), name) != value
            }
            yield Option(settings=different, plan=estimate(changed(settings, **sections), hardware, vocab=vocab))


def search(settings: config.Config, hardware: Hardware, *, vocab: int, best: int = 5) -> list[Option]:
    """The fastest that fit, the one with less memory first where two are as fast."""
    found = sorted(
        options(settings, hardware, vocab=vocab), key=lambda o: (-round(o.plan.speed.rate, -1), o.plan.memory.least)
    )
    return list(islice((o for o in found if o.plan.memory.fits(USABLE * hardware.memory)), best))


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

    def candidate(width: int) -> config.Config:
        return replace(settings, model=_scaled(settings.model, 64 * width))

    fitting = bisect_left(range(1, 257), True, key=lambda width: not _any_fits(candidate(width), hardware, vocab))
    if not fitting:
        return None
    found = candidate(fitting)
    options = search(found, hardware, vocab=vocab, best=1)
    if not options:
        return None
    return Fit(model=found.model, parameters=num_parameters(found.model, vocab).total, option=options[0])


def scaling(plan: Plan) -> list[dict[str, float]]:
    """The same model and batch on 1 to 4096 GPUs: tokens per second of all, by sharding; 0 where it cannot run."""
    settings, vocab = plan.settings, plan.sizes.vocab
    rows = []
    for gpus in (2**n for n in range(13)):
        hardware = _resized(plan.hardware, gpus)
        # Where the batch is too small for the GPUs, it grows with them: that is another run
        sequences = max(settings.batch.sequences, gpus)
        micro = max(m for m in _divisors(sequences // gpus) if m <= settings.batch.micro)
        batch = dict(micro=micro if sequences % (micro * gpus) == 0 else 1, sequences=sequences)
        row: dict[str, float] = {"gpus": gpus, "too_small": float(settings.batch.sequences < gpus)}
        for name, dp_replicate in (("fsdp", 1), ("hsdp", max(gpus // hardware.node, 1))):
            parallel = dict(dp_replicate=dp_replicate, reshard_after_forward=True)
            candidate = changed(settings, batch=batch, parallel=parallel)
            row[name] = speed(work_of(candidate, vocab=vocab, dp_size=gpus), hardware).rate * gpus
            row[f"{name}_memory"] = memory(candidate, vocab=vocab, dp_size=gpus).least * BESIDE
            row[f"{name}_fits"] = float(row[f"{name}_memory"] <= hardware.memory)
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


def _about_micro(plan: Plan) -> str:
    micro = largest_micro(plan.settings, plan.hardware, vocab=plan.sizes.vocab)
    if micro is None:
        return ""
    tail = ", which is what is set"
    if micro != plan.settings.batch.micro:
        other = estimate(changed(plan.settings, batch=dict(micro=micro)), plan.hardware, vocab=plan.sizes.vocab)
        tail = f" ({other.speed.rate / plan.speed.rate - 1:+.1%} speed)"
    return f"the largest batch.micro that fits is {micro}{tail}"


def _about_attention(plan: Plan) -> str:
    """The backends that auto takes there, down to the first that needs no package."""
    model, T, half = plan.settings.model, plan.settings.data.sequence, plan.settings.parallel.precision != "fp32"
    request = capabilities.Request(
        generation=capabilities.generation_of(plan.hardware.gpu.architecture), dtype="bfloat16" if half else "float32",
        num_queries=T, num_keys=T, num_heads=model.heads, num_kv_heads=model.kv_heads, head_dim=model.head_dim,
        documents="cu_seqlens" if plan.settings.data.document_mask else "", repeats=model.deterministic,
    )  # fmt: skip
    names = capabilities.able(request)
    packages = [*takewhile(bool, (capabilities.TABLE[name].package for name in names))]
    backends = [f"{name} with {package}" for name, package in zip(names, packages, strict=False)]
    return f"attention runs on {', else '.join([*backends, *names[len(packages) :][:1]])}"


def _about_recomputation(plan: Plan) -> str:
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
        return ""
    best = max(rates, key=lambda name: (rates[name][0], -RECOMPUTE.index(name)))
    rate, micro = rates[best]
    as_set = (best, micro) == (settings.parallel.recompute, settings.batch.micro)
    losers = {name: row for name, row in rates.items() if name != best}
    others = ", ".join(f"{name} {value / rate - 1:+.1%} (batch.micro {m})" for name, (value, m) in losers.items())
    worth = "is not worth it" if best == "none" else f"pays: {best}"
    tail = f"; against it {others}" if others else "; nothing else fits"
    change = "" if as_set else f" ({rate / plan.speed.rate - 1:+.1%} from here)"
    return f"recomputation {worth}, with batch.micro {micro}{change}{tail}"


def _about_sharding(plan: Plan) -> str:
    settings, hardware, vocab = plan.settings, plan.hardware, plan.sizes.vocab
    if hardware.gpus == 1:
        return ""
    found = []
    for dp_replicate, reshard in product(_replica_counts(hardware), (True, False)):
        candidate = changed(settings, parallel=dict(dp_replicate=dp_replicate, reshard_after_forward=reshard))
        other = estimate(candidate, hardware, vocab=vocab)
        found.append((other.speed.rate, dp_replicate, reshard, other))
    found.sort(key=lambda row: row[:3], reverse=True)
    if (best := next((row for row in found if row[3].fits), None)) is None:
        return ""
    rate, dp_replicate, reshard, _ = best
    shards = hardware.gpus // dp_replicate
    groups = f"HSDP, {dp_replicate} groups of {shards} GPUs" if shards > 1 else "all weights on each GPU"
    kind = "FSDP over all GPUs" if dp_replicate == 1 else f"{groups} (parallel.dp_replicate {dp_replicate})"
    held = "" if reshard else ", weights held through a step (parallel.reshard_after_forward False)"
    moving = sum(collectives(work_of(settings, vocab=vocab, dp_size=hardware.gpus), hardware).values())
    share = plan.speed.parts["exposed"] / plan.speed.seconds
    return (
        f"sharding for these GPUs: {kind}{held} ({rate / plan.speed.rate - 1:+.1%}); as set, a step has {moving:.2f} s "
        f"of communication, and {share:.0%} of the step waits for it"
    )


def _about_loss(plan: Plan) -> str:
    settings, a, vocab = plan.settings, 4 if plan.precision == "fp32" else 2, plan.sizes.vocab
    tokens = settings.batch.micro * settings.data.sequence
    chunk = planned_chunk(tokens, settings.model.hidden, vocab, precision=plan.precision, device="cuda").tokens
    plain = memory(settings, vocab=vocab, dp_size=plan.hardware.gpus, loss="plain")
    return (
        f"linear cross-entropy takes {chunk:,} of {tokens:,} tokens at a time, {memory_size(chunk * vocab * a)} of "
        f"logits; plain cross-entropy would raise the peak by {memory_size(max(plain.bytes - plan.memory.bytes, 0))}"
    )


def _about_batch(plan: Plan) -> str:
    """Where more GPUs stop helping."""
    gpus, sequence = plan.hardware.gpus, plan.settings.data.sequence
    if gpus == 1 or plan.settings.batch.sequences // gpus > 1:
        return ""
    return (
        f"the batch is as small as it can be for {gpus} GPUs: 1 sequence, {sequence:,} tokens each; more GPUs need a "
        "larger batch.sequences"
    )


def _fits(settings: config.Config, hardware: Hardware, vocab: int) -> bool:
    return memory(settings, vocab=vocab, dp_size=hardware.gpus).fits(USABLE * hardware.memory)


def _any_fits(settings: config.Config, hardware: Hardware, vocab: int) -> bool:
    """With the least memory that settings can bring about."""
    reduce = "every" if settings.batch.sequences > hardware.gpus > 1 else "last"
    parallel = dict(recompute="full", dp_replicate=1, reshard_after_forward=True, grad_reduce=reduce)
    return _fits(changed(settings, batch=dict(micro=1), parallel=parallel), hardware, vocab)


def _enough_gpus(plan: Plan) -> int | None:
    for gpus in (2**n for n in range(1, 14) if 2**n > plan.hardware.gpus):
        settings = changed(plan.settings, batch=dict(micro=1, sequences=max(plan.settings.batch.sequences, gpus)))
        if _any_fits(settings, _resized(plan.hardware, gpus), plan.sizes.vocab):
            return gpus
    return None


def _resized(hardware: Hardware, gpus: int) -> Hardware:
    return replace(hardware, gpus=gpus, node=min(max(hardware.node, hardware.gpu.node), gpus))


def _replica_counts(hardware: Hardware) -> list[int]:
    """1 is FSDP; a group within a node, or of a few nodes, is HSDP; groups of one GPU share nothing."""
    groups = {hardware.node * n for n in (1, 2, 4) if hardware.node * n <= hardware.gpus}
    return sorted({1, hardware.gpus, *(hardware.gpus // group for group in groups if hardware.gpus % group == 0)})


def _scaled(model: config.ModelConfig, hidden: int) -> config.ModelConfig:
    """As wide, with the proportions of a model."""
    heads = max(hidden // model.head_dim, 1)
    group = model.heads // model.kv_heads
    kv_heads = heads // group if heads % group == 0 else heads
    layers = max(hidden // 64, 2) if hidden <= 2048 else 32 + (hidden - 2048) // 256
    ffn = -(-round(hidden * model.ffn / model.hidden) // 64) * 64
    return replace(model, hidden=hidden, heads=heads, kv_heads=kv_heads, layers=layers, ffn=ffn)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def summary_of(fit: Fit) -> str:
    """One line."""
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")
    settings = " ".join(f"--model.{name} {getattr(fit.model, name)}" for name in names)
    return f"{count(fit.parameters)} parameters: {settings}"
