"""How gradients change weights: AdamW or Muon, the learning rate of a step, clipping, and the loss scale of fp16.

optimizer = make_optimizer(model, optim, device)        # after fully_shard, which replaces parameters
scaler = make_scaler(precision, device)                 # does nothing unless precision is fp16
for step in ...:
    set_learning_rate(optimizer, optim, step, steps)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip(model.parameters(), optim.clip)         # or gradient_norms and scale_gradients, for norms by group
    skip_unless_finite(optimizer, norm)            # not with fp16: its scaler does
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

from fasttrain.optim.muon import Muon, orthogonalise
from fasttrain.optim.optimizer import (
    clip,
    gradient_norms,
    learning_rate,
    make_optimizer,
    make_scaler,
    scale_gradients,
    set_learning_rate,
    skip_unless_finite,
)

__all__ = [
    "Muon",
    "clip",
    "gradient_norms",
    "learning_rate",
    "make_optimizer",
    "make_scaler",
    "orthogonalise",
    "scale_gradients",
    "set_learning_rate",
    "skip_unless_finite",
]
