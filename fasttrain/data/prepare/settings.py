"""What decides about the tokens of a preparation, beside its inputs."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.data.prepare.chunks import PIECE


@dataclass(frozen=True, kw_only=True)
class Settings:
    text_key: str = "text"
    validation: float = 0.005
    shortest: int = 16
    longest: int = PIECE
    keep_duplicates: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"prepare: the share of validation ({self.validation}) must be from 0 to less than 1")
        if self.shortest < 1:
            raise ValueError(f"prepare: shortest ({self.shortest}) must be 1 or more: empty documents are no documents")
        if not 1024 <= self.longest <= 2**28:
            raise ValueError(f"prepare: longest ({self.longest}) must be from 1 KB to 256 MB")
