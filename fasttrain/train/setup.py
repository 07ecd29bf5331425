"""Everything before the first step: data -> model -> optimizer -> progress, new or from a checkpoint."""

from dataclasses import dataclass, replace

import torch

from fasttrain.checkpoint import resume
from fasttrain.checkpoint.disk_space import check_disk_space
from fasttrain.checkpoint.state import restore
from fasttrain.config import Config
from fasttrain.data.datasets import training_data
from fasttrain.data.lint.checks import suspicions
from fasttrain.distributed.cuda_graph import make_graph
from fasttrain.distributed.parallelize import parallelize, should_compile
from fasttrain.distributed.runtime import Runtime
from fasttrain.flops import flops_per_token
from fasttrain.hf.load import load_pretrained, tokenizer_warning
from fasttrain.metrics.hardware import peak_flops
from fasttrain.model import Decoder
from fasttrain.monitor import make_monitor
from fasttrain.optim.optimizer import make_optimizer, make_scaler
from fasttrain.tools.plan.sizes import Sizes, at_start
from fasttrain.tools.profiling import check as check_profile
from fasttrain.train.state import Progress, TrainState


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """What there is to say about the start of a run."""

    plan: Sizes
    peak: float  # FLOP/s of a device
    compiled: bool
    why_not_compiled: str
    corrupt: list[str]  # newer checkpoints than the one that the run resumes from
    changes: list[resume.Change]  # against the settings of that checkpoint
    suspicions: list[str]  # about the data
    tokenizer_warning: str  # whether data and pretrained weights belong together


def prepare(settings: Config, runtime: Runtime) -> tuple[TrainState, StartReport]:
    """Build the state of a run. User errors show here."""
    if problem := settings.batch.indivisible(runtime.dp_size):
        raise ValueError(problem)
    data = training_data(settings.data)
    suspected = suspicions(data.datasets.values(), settings.data) if runtime.is_main else []
    vocab = data.embedding_rows(settings)
    per_sequence = settings.data.sequence * flops_per_token(settings.model, vocab, settings.data.sequence)
    flops = settings.batch.steps * settings.batch.sequences * per_sequence
    compiled, why_not = should_compile(settings.parallel, runtime, flops)
    graph = make_graph(settings.parallel, runtime)
    model = _model(settings, vocab, runtime, compiled=compiled)
    optimizer = make_optimizer(model, settings.optim, runtime.device, captured=graph is not None)
    scaler = make_scaler(runtime.precision, runtime.device)
    peak = peak_flops(runtime.device, runtime.dtype)
    monitor = make_monitor(
        settings, runtime, vocab, repeated=data.repeated(), peak=peak, compiled=compiled, scaled=scaler.is_enabled()
    )
    progress, changes, corrupt, warning = Progress(), list[resume.Change](), list[str](), ""
    checkpoint = resume.starting_point(settings, runtime.checkpoint_group, on_warning=corrupt.append)
    if checkpoint is None:
        if settings.from_hf is not None:
            warning = tokenizer_warning(settings.from_hf, data)
        init_weights(model, settings)
    else:
        saved = checkpoint.metadata
        changes = resume.changed_settings(saved["config"], settings)
        changes += resume.changed_content(saved["datasets"], data.digests)
        progress = Progress.of(saved["progress"])
        cursor = resume.cursor_after(progress.step, progress.cursor, saved, changes, settings, data.digests)
        progress = replace(progress, cursor=cursor)
        restore(checkpoint, model, optimizer, scaler, group=runtime.checkpoint_group)
        if not resume.moves_data(changes):  # other batches have other noise
            monitor.restore(saved["monitor"])
    check_disk_space(settings, vocab)
    check_profile(settings.log.profile, left=settings.batch.steps - progress.step)
    state = TrainState(
        settings=settings, runtime=runtime, data=data, model=model, optimizer=optimizer, scaler=scaler, graph=graph,
        progress=progress, monitor=monitor, resumed_from=checkpoint.path if checkpoint else None,
    )  # fmt: skip
    state.batches.check_last(settings.batch.steps)
    tokens_of = {name: float(len(dataset.split("train"))) for name, dataset in data.datasets.items()}
    plan = at_start(settings, vocab=vocab, dp_size=runtime.dp_size, dataset=tokens_of)
    if plan.contradictions and checkpoint is None:
        raise ValueError("; ".join(plan.contradictions))
    return state, StartReport(
        plan=plan, peak=peak, compiled=compiled, why_not_compiled=why_not, corrupt=corrupt, changes=changes,
        suspicions=suspected, tokenizer_warning=warning,
    )  # fmt: skip


def init_weights(model: Decoder, settings: Config) -> None:
    """Give a model random weights, or those of the Hugging Face checkpoint that the run starts from."""
    if settings.from_hf is None:
        model.init_weights(settings.seed)
    else:
        load_pretrained(model, settings.from_hf)


def _model(settings: Config, vocab: int, runtime: Runtime, *, compiled: bool) -> Decoder:
    """The decoder on its ranks, with memory for this rank's share of the weights, and no weights yet."""
    with torch.device("meta"):
        model = Decoder(settings.model, vocab=vocab, sequence=settings.data.sequence, z_loss=settings.optim.z_loss)
    parallelize(model, settings.parallel, runtime, compiled=compiled)
    return model.to_empty(device=runtime.device)
