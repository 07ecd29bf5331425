"""A run's checkpoint as a Hugging Face checkpoint: Qwen3, or Llama without qk_norm. docs/export.md explains the files.

source = describe(find("runs/tiny@300"))
result = export(source, Path("exports/tiny"), dtype="bf16")
"""

from fasttrain.export.exporting import SHARD, Exported, export
from fasttrain.export.source import WITHOUT, Source, describe

__all__ = ["SHARD", "WITHOUT", "Exported", "Source", "describe", "export"]
