"""Text from a model: one token after the other, each drawn from the likeliest few."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fasttrain.model import Decoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEMPERATURE, LIKELIEST = 0.8, 40


def continue_text(
    model: Decoder, tokenizer: Tokenizer, separator: int, prompt: str, *, tokens: int, device: torch.device
) -> str:
    """The prompt, as the beginning of a document, and what the model makes of it. Every rank has to call this.

    The same weights give the same text. Each token costs a forward pass of a whole sequence, always of one shape.
    """
    ids = [separator, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    window = torch.zeros(1, model.sequence, dtype=torch.int64, device=device)  # causal: what follows is not seen
    generator = torch.Generator().manual_seed(0)
    training = model.training
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for _ in range(tokens):
            seen = ids[-model.sequence :]
            window[0, : len(seen)] = torch.tensor(seen)
            scores, candidates = model.logits(window)[0, len(seen) - 1].float().cpu().topk(LIKELIEST)
            choice = torch.multinomial((scores / TEMPERATURE).softmax(-1), 1, generator=generator)
            drawn = candidates[choice].to(device)
            dist.broadcast(drawn, 0)  # ranks on unlike hardware may disagree in the last digit
            if int(drawn) == separator:
                break
            ids.append(int(drawn))
    model.train(training)
    return tokenizer.decode(ids[1:])
