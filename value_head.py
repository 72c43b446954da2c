"""The critic of SPPO: a scalar value V_phi(s_p), read off the prompt alone.

Paper, section on the value model: V_phi(s_p) = sigmoid(v_phi(s_p)) is the probability that the current policy solves
the prompt ("solvability"). It is its own network, may be much smaller than the policy, and is trained as a classifier.

Shapes: B sequences in a batch, S tokens in the longest of them, D hidden width, n positions asked for.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Critic(nn.Module):
    """A transformer without a language-model head, and one linear map from a hidden state to the logit v.

    backbone: what `transformers.AutoModel` loads. The map starts at zero, so that an untrained V is 0.5 everywhere:
    no prompt starts with a random preference. (`start_at` then moves all of them to the accuracy just measured.)
    """

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Logits v [n] at the positions `where` = (row [n], column [n]) of the right-padded ids [B, S].

        SPPO asks for one position a row, the last prompt token. (Token-level PPO asks for every response token.)
        Attention is causal and padding stands on the right, so no position ever sees padding: no mask is needed.
        """
        hidden = self.backbone(input_ids=ids, use_cache=False).last_hidden_state[where]  # [n, D]
        # A dot product written out, in float32 even under autocast: bfloat16 would round v to three digits.
        return (hidden.float() * self.head.weight.float()).sum(-1) + self.head.bias.float()  # [n]

    def start_at(self, solve_rate: float) -> None:
        """Set the bias so that V(s_p) is the measured solve rate for every prompt, before anything is learned."""
        p = min(max(solve_rate, 0.01), 0.99)
        with torch.no_grad():
            self.head.bias.fill_(torch.logit(torch.tensor(p)).item())


def value_loss(v: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """L_V(phi) = -[R log V + (1 - R) log(1 - V)], one number a row: v [n] logits, target [n] in [0, 1] -> [n].

    Taken on the logit, where it cannot overflow. Its gradient is dL/dv = V - R = -A: the surprise that moves
    the policy moves the critic. On average that is V - p, so it stops where V is the solve rate p = P(R = 1 | s_p).
    """
    return F.binary_cross_entropy_with_logits(v, target, reduction="none")


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of a transformer's blocks, found by its length (it is called `layers`, `h`, `blocks`, ...).

    Raises ValueError where the model has no list of `count` blocks.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers")


def keep_first_layers(backbone: nn.Module, keep: int) -> nn.Module:
    """Cut the backbone down to its first `keep` blocks: a small critic where no smaller sibling of the model exists.

    Predicting solvability is easier than reasoning (the paper pairs a 1.5B critic with a 7B policy). The final norm
    stays. Raises ValueError unless 1 <= keep <= number of blocks.
    """
    config = backbone.config.get_text_config()
    total = config.num_hidden_layers
    if not 1 <= keep <= total:
        raise ValueError(f"--critic-layers {keep}: this model has {total} layers; choose 1 to {total}")
    layers = decoder_layers(backbone, total)
    del layers[keep:]
    config.num_hidden_layers = keep
    if getattr(config, "layer_types", None):  # which kind of attention each block has, one entry a block
        config.layer_types = config.layer_types[:keep]
    return backbone
