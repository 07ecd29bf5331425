"""The configuration that a command line asks for: a recipe, TOML files, then options, later ones override earlier ones.

    python -m fasttrain.train --recipe tiny --config run.toml --optim.lr 3e-4

One parser (tyro) reads all of them: the lines of a TOML file become arguments. So an unknown key or a wrong type is the
same error everywhere, names the nearest valid key, and comes before anything else happens: no torch is imported here.
"""

import argparse
import dataclasses
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from fasttrain.bounds import bounds_of
from fasttrain.config import ComponentConfig, Config
from fasttrain.config_toml import from_toml
from fasttrain.hf.config import TAKEN, architecture
from fasttrain.rundir import RunDir
from fasttrain.schema import parse

DESCRIPTION = (
    "Sources of the settings, later ones override earlier ones: --recipe NAME ({recipes}), --config FILE.toml "
    "(repeatable), and the options below. --profile is --log.profile 3. Several datasets, in place of --data.path: "
    "--data.mixture.NAME.path, --data.mixture.NAME.weight and --data.mixture.NAME.epochs, for any NAME."
)

PATHS = ("--out", "--data.path", "--data.tokenizer", "--from_hf", "--from-hf")


def load(argv: Sequence[str], recipes: Mapping[str, Callable[[], Config]], prog: str = "fasttrain.train") -> Config:
    """The configuration that a command line asks for. A mistake in it ends the program with exit code 2."""
    sources = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    sources.add_argument("--recipe", default=next(iter(recipes)))
    sources.add_argument("--config", action="append", default=[], type=Path)
    sources.add_argument("--profile", action="store_true")
    chosen, arguments = sources.parse_known_args(argv)
    if chosen.profile:
        arguments = ["--log.profile", "3", *arguments]
    try:
        if chosen.recipe not in recipes:
            raise ValueError(f"there is no recipe {chosen.recipe!r}; there are {', '.join(recipes)}")
        for path in reversed(chosen.config):
            arguments = [*_arguments(_read(path)), *arguments]
        for name, value in pairwise(arguments):
            if name in PATHS and not value:
                raise ValueError(f"{name} is empty; name a path, or remove it")
        default = recipes[chosen.recipe]()
        found = _found(arguments, default)
        default = dataclasses.replace(default, model=dataclasses.replace(default.model, **found))
        default = _with_warmup_that_fits(default, arguments)
        settings = tyro.cli(
            Config,
            args=arguments,
            default=_with_components(default, arguments),
            prog=prog,
            description=DESCRIPTION.format(recipes=", ".join(recipes)),
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
            registry=SECTIONS,
        )
        for name, value in found.items():
            if (stated := getattr(settings.model, name)) != value:
                raise ValueError(
                    f"model.{name} is set to {stated}, and {settings.from_hf} has {value}; remove it: --from-hf brings "
                    "the model with it"
                )
        return settings
    except (ValueError, FileNotFoundError) as error:
        sources.error(str(error))
    except SystemExit as exit:
        if exit.code:  # tyro knows similar spellings, not similar meanings
            for hint in filter(None, map(_hint, arguments)):
                print(hint, file=sys.stderr)
        raise


def _found(arguments: Sequence[str], default: Config) -> Mapping[str, Any]:
    """What the checkpoint that --from_hf names says of the model, in place of what the recipe says.

    A run that has begun knows it too, and continues without the checkpoint.
    """
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--from_hf", "--from-hf", default=default.from_hf, nargs="?")
    named.add_argument("--out", default=default.out, nargs="?")
    words = named.parse_known_args(arguments)[0]
    if words.from_hf in (None, "None"):  # or without a value, of which tyro will tell
        return {}
    try:
        return architecture(Path(words.from_hf))
    except FileNotFoundError:
        stored = RunDir(Path(words.out or default.out)).config
        before = _read(stored) if stored.exists() else {}
        if before.get("from_hf") != str(Path(words.from_hf)):
            raise
        model = vars(from_toml(stored.read_text("utf-8")).model)
        return {name: model[name] for name in TAKEN}


def _with_warmup_that_fits(default: Config, arguments: Sequence[str]) -> Config:
    """With a tenth of the steps that arguments ask for as warm-up, where that of the recipe is as long or longer."""
    stated = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    stated.add_argument("--batch.steps", dest="steps", nargs="?")
    stated.add_argument("--optim.warmup", dest="warmup", nargs="?", const="")
    words, optim = stated.parse_known_args(arguments)[0], default.optim
    if words.warmup is not None or not (words.steps or "").isdecimal() or not 0 < int(words.steps) <= optim.warmup:
        return default
    warmup = int(words.steps) // 10
    print(
        f"note: the recipe's warm-up of {optim.warmup} steps is not shorter than the run, batch.steps {words.steps}: "
        f"optim.warmup is {warmup}, a tenth of it",
        file=sys.stderr,
    )
    return dataclasses.replace(default, optim=dataclasses.replace(optim, warmup=warmup))


SECTIONS = ConstructorRegistry()


@SECTIONS.struct_rule
def _section(info: StructTypeInfo) -> StructConstructorSpec | None:
    """A section as tyro reads it, with the bounds of a number after its meaning."""
    if not dataclasses.is_dataclass(info.type) or info.in_union_context:
        return None
    # By tyro's own rule, as that of a union: this one does not apply to it
    read: Any = ConstructorRegistry.get_struct_spec(dataclasses.replace(info, in_union_context=True))
    meanings = {name: str(bounds).capitalize() for name, (bounds, _) in bounds_of(info.type).items()}
    fields = (
        dataclasses.replace(f, helptext=f"{f.helptext()} {meanings[f.name]}.") if f.name in meanings else f
        for f in read.fields
    )
    return dataclasses.replace(read, fields=tuple(fields))


def _with_components(default: Config, arguments: Sequence[str]) -> Config:
    """With a place for every component of data.mixture that arguments name: the parser wants to know them."""
    prefix = "--data.mixture."
    names = [argument.removeprefix(prefix).split(".")[0] for argument in arguments if argument.startswith(prefix)]
    added = {name: ComponentConfig(path=tyro.MISSING) for name in names if name not in default.data.mixture}
    return dataclasses.replace(default, data=dataclasses.replace(default.data, mixture=default.data.mixture | added))


OTHER_TRAINERS = {  # what other trainers call a setting, and what it is called here
    "--optim.lr": ("learning_rate", "lr", "max_lr", "peak_lr"),
    "--batch.sequences": ("batch_size", "global_batch_size", "train_batch_size", "total_batch_size"),
    "--batch.micro": (
        "micro_batch_size", "local_batch_size", "device_batch_size", "per_device_train_batch_size",
        "gradient_accumulation_steps", "grad_accum_steps",
    ),
    "--batch.steps": ("max_steps", "max_iters", "num_iterations", "train_iters", "num_steps", "total_steps", "steps"),
    "--data.sequence": ("block_size", "seq_len", "seq_length", "sequence_length", "max_seq_len", "context_length"),
    "--optim.warmup": ("warmup_steps", "warmup_iters", "lr_warmup_steps"),
    "--optim.clip": ("grad_clip", "max_grad_norm", "max_norm", "clip_grad"),
    "--optim.schedule": ("lr_scheduler_type", "lr_scheduler", "decay_lr", "lr_decay_style"),
    "--checkpoint.every": ("save_interval", "save_steps", "save_every", "checkpoint_interval"),
    "--validation.every": ("eval_interval", "eval_steps", "eval_every", "val_interval"),
    "--model.layers": ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "depth"),
    "--model.hidden": ("n_embd", "dim", "hidden_size", "d_model"),
    "--model.heads": ("n_head", "n_heads", "num_attention_heads"),
    "--model.kv_heads": ("n_kv_heads", "num_key_value_heads"),
    "--parallel.precision": ("dtype", "mixed_precision", "bf16", "fp16"),
    "--parallel.recompute": ("activation_checkpointing", "gradient_checkpointing"),
    "--out": ("output_dir", "out_dir", "save_dir"),
}  # fmt: skip


def _hint(argument: str) -> str:
    """What may be meant by an argument that no setting has; empty: nothing is wrong with it, or nobody knows."""
    last = argument.split("=")[0].removeprefix("--").rpartition(".")[2].replace("-", "_")
    ours = [name for name, theirs in OTHER_TRAINERS.items() if last in theirs]
    if argument.startswith("--") and ours and argument not in ours:
        return f"{argument} is unknown; here it is {ours[0]}"
    sections = {name: list(vars(value)) for name, value in vars(Config()).items() if dataclasses.is_dataclass(value)}
    section, _, key = argument.removeprefix("--").partition(".")
    key = key.split(".")[0]
    if not argument.startswith("--") or not key or key in sections.get(section, []):
        return ""
    if section in sections:
        return f"{argument} is unknown; {section} has {', '.join(sections[section])}"
    others = [f"--{other}.{key}" for other, keys in sections.items() if key in keys]
    meant = f"did you mean {' or '.join(others)}?" if others else f"sections are {', '.join(sections)}"
    return f"{argument} is unknown: there is no section {section}; {meant}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse(path.read_text("utf-8"), tomllib.loads)
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path}: {getattr(error, 'strerror', error)}") from None


def _arguments(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A TOML table as the arguments that say the same."""
    for key, value in table.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" != "validation.sets":
            yield from _arguments(value, f"{prefix}{key}.")
        else:
            yield f"--{prefix}{key}"
            yield from map(str, _flat(value))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value
