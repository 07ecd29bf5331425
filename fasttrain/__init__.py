"""fasttrain: a performance-oriented LLM pretrainer."""

from importlib.metadata import version

__version__ = version("fasttrain")
