"""How far predictions lie from what came and from another model's, in nats, token by token and in double precision."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 32  # of logits in double at once: a vocabulary of 262,144 takes 2 MiB for each


@dataclass
class Tally:
    """Sums over scored tokens.

    Attributes:
        tokens: how many.
        loss: negative log-likelihood, nats.
        divergence: Kullback-Leibler divergence of the exact cache's distribution from this one, nats.
        agreeing: where both hold the same token for the likeliest.
    """

    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0

    @property
    def perplexity(self) -> float:
        """exp of the mean loss; infinite where that is no number a float holds."""
        mean = self.loss / self.tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def kl(self) -> float:
        """Mean divergence, nats."""
        return self.divergence / self.tokens

    @property
    def top1(self) -> float:
        """Share of tokens whose likeliest successor is the same."""
        return self.agreeing / self.tokens

    def add(self, logits: Tensor, exact: Tensor, targets: Sequence[int]) -> None:
        """Counts predictions in.

        Args:
            logits: [n, vocabulary], of the policy.
            exact: [n, vocabulary], log-probabilities by the exact cache at the same tokens; see `logprobs`.
            targets: [n] the tokens that came.
        """
        wanted = torch.tensor(targets, device=logits.device)[:, None]
        for start in range(0, len(targets), ROWS):
            rows = slice(start, start + ROWS)
            ours, theirs = logits[rows].double().log_softmax(-1), exact[rows]
            self.loss -= float(ours.gather(1, wanted[rows]).sum())
            self.divergence += float(torch.nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True))
            self.agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self.tokens += len(targets)


def logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities in double precision, [n, vocabulary]; for all policies that are compared with them."""
    return logits.double().log_softmax(-1)


def losses(logits: Tensor, targets: Sequence[int]) -> list[float]:
    """Negative log-likelihood of each token that came, nats; logits [n, vocabulary]."""
    found: list[float] = []
    wanted = torch.tensor(targets, device=logits.device)[:, None]
    for start in range(0, len(targets), ROWS):
        rows = slice(start, start + ROWS)
        found += (-logits[rows].double().log_softmax(-1).gather(1, wanted[rows])[:, 0]).tolist()
    return found
