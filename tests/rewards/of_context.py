"""A reward from a function of a rollout."""

import torch

from hf_captionrl.rewards import Reward


class OfContext(Reward):
    def __init__(self, function, name="of_context"):
        self.function, self.name = function, name

    def __call__(self, context):
        return torch.as_tensor(self.function(context))
