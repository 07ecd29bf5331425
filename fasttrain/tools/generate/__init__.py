"""Text from a model. docs/generate.md explains the command.

for texts in generate(model, [[separator, *ids], ...], tokens=64, sampling=Sampling(top_p=0.9), end=separator):
    ...                                    # after each token: texts[i].ids, texts[i].ended
"""

from fasttrain.tools.generate.decoding import Continuation, generate
from fasttrain.tools.generate.sampling import Sampling
from fasttrain.tools.generate.text import TextStream, continue_text

__all__ = ["Continuation", "Sampling", "TextStream", "continue_text", "generate"]
