"""What a plan asks of the data, if the data is here: how many tokens there are, and the vocabulary."""

from __future__ import annotations

from fasttrain import config

DEFAULT_VOCAB = 4096  # of Python's standard library, the data of a run that names none


def is_here(data: config.DataConfig) -> bool:
    """Whether the data can be looked at. The default dataset is not built for this."""
    if data.mixture:
        return all(component.path.exists() for component in data.mixture.values())
    if data.path is not None:
        return data.path.exists()
    from fasttrain.data.corpus import standard_library_path

    return standard_library_path().exists()


def dataset_tokens(settings: config.Config) -> dict[str, float] | None:
    """Tokens to train on, by component; None: the data is not here, or not named yet.

    A vocabulary that is not that of the default dataset says that other data is meant.
    """
    data = settings.data
    unnamed = data.path is None and not data.mixture and settings.model.vocab not in (None, DEFAULT_VOCAB)
    if unnamed or not is_here(data):
        return None
    from fasttrain.data import training_data  # torch, which a plan does without otherwise

    return {name: float(len(dataset.split("train"))) for name, dataset in training_data(data).datasets.items()}


def vocab_of(settings: config.Config) -> int:
    """Rows of the embedding, as the trainer decides them."""
    if settings.model.vocab:
        return settings.model.vocab
    data = settings.data
    if data.path is None and not data.mixture:
        needed = DEFAULT_VOCAB
    elif is_here(data):
        from fasttrain.data import training_data

        needed = training_data(data).first.vocab
    elif data.vocab:
        needed = data.vocab
    else:
        raise ValueError(
            f"model.vocab is not set, and the data that would tell it is not here ({data.path or 'data.mixture'}); set "
            "model.vocab"
        )
    return -(-needed // 64) * 64
