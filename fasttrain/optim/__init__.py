"""How gradients change weights: the optimizers, the learning rate of a step, clipping, and the loss scale of fp16."""
