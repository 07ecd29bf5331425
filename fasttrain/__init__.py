"""fasttrain: a performance-oriented LLM pretrainer."""
