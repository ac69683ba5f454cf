"""Sharpness-aware training of small Hugging Face models, written out by hand: what the Trainer must agree with.

Nothing here is imported from bisam. A task has samples, a model, and the two losses of a micro-batch, each with the
weight that the Trainer gives to it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import reference

VOCABULARY, TOKENS, CLASSES = 11, 6, 3


def bert(head, dropout: float = 0.0, **options) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **{"vocab_size": VOCABULARY, "num_labels": CLASSES, **options},
    )
    return head(config)


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=TOKENS,
    )
    return LlamaForCausalLM(config)


def bart() -> nn.Module:
    """A model that is called causal, but whose loss compares each token with the label at the same position."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=8,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        max_position_embeddings=TOKENS,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=2,
    )
    model = BartForCausalLM(config)
    for layer in model.model.decoder.layers:
        for unused in (layer.encoder_attn, layer.encoder_attn_layer_norm):
            unused.requires_grad_(False)
    return model


class Own(nn.Module):
    """A model that is not of the library and takes no arguments of the loss: the Trainer divides by micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def of_sequences() -> list[dict[str, Tensor]]:
    """One label for each sample."""
    draws = torch.Generator().manual_seed(1)
    return [{"input_ids": _words(draws), "labels": torch.randint(CLASSES, (), generator=draws)} for _ in range(10)]


def of_tokens(classes: int) -> list[dict[str, Tensor]]:
    """A label for each token; how many are ignored differs from sample to sample, and one sample has none at all."""
    draws = torch.Generator().manual_seed(2)
    samples = []
    for number in range(10):
        labels = torch.randint(classes, (TOKENS,), generator=draws)
        labels[: (number * 3) % TOKENS] = -100
        samples.append({"input_ids": _words(draws), "labels": labels})
    samples[3]["labels"][:] = -100
    return samples


def _words(draws: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (TOKENS,), generator=draws)


Batch = dict[str, Tensor]
Update = list[Batch]


def rows(model: nn.Module, batch: Batch, *, shifted: bool) -> tuple[Tensor, Tensor]:
    """The logits and labels that count."""
    output = model(input_ids=batch["input_ids"])
    logits, labels = output["logits"], batch["labels"]
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    counted = labels != -100
    return logits[counted], labels[counted]


@dataclass
class Case:
    model: Callable[[], nn.Module]
    samples: list[Batch]
    most: float
    """The norm that gradients are clipped to: some updates have more, some less."""
    of_means: bool = False
    """Whether the model's loss is the mean over a micro-batch, and not its part of the sum over the update's tokens."""
    shifted: bool = False
    is_causal: bool = False
    """Whether the Trainer does not count the first label of a sample, as it does where labels are shifted."""
    divides: bool = False
    """Whether the Trainer divides by the number of micro-batches."""
    smoothing: float = 0.0

    def items(self, update: Update) -> int:
        first = 1 if self.shifted or self.is_causal else 0
        return sum(int((batch["labels"][..., first:] != -100).sum()) for batch in update)

    def descent(self, model: nn.Module, batch: Batch, update: Update) -> Tensor:
        logits, labels = rows(model, batch, shifted=self.shifted)
        log_probabilities = torch.log_softmax(logits, -1)
        losses = -log_probabilities[torch.arange(len(labels)), labels]
        losses = (1 - self.smoothing) * losses - self.smoothing * log_probabilities.mean(-1)
        if self.divides:
            return losses.mean() / len(update)
        return losses.mean() if self.of_means else losses.sum() / self.items(update)

    def bound(self, model: nn.Module, batch: Batch, update: Update) -> Tensor:
        logits, labels = rows(model, batch, shifted=self.shifted)
        if len(labels) == 0:
            return logits.sum()
        q = reference.q_log(logits, labels)
        return q / len(update) if self.divides else q * len(labels) / self.items(update)


TASKS = {
    "sequences": Case(lambda: bert(BertForSequenceClassification), of_sequences(), most=0.95, of_means=True),
    "tokens": Case(lambda: bert(BertForTokenClassification), of_tokens(CLASSES)[4:], most=1.7, of_means=True),
    "masked": Case(lambda: bert(BertForMaskedLM), of_tokens(VOCABULARY)[4:], most=1.6, of_means=True),
    "causal": Case(llama, of_tokens(VOCABULARY), most=0.95, shifted=True),
    "unshifted": Case(bart, of_tokens(VOCABULARY)[4:], most=1.0, of_means=True, is_causal=True),
    "own": Case(Own, of_sequences(), most=0.9, of_means=True, divides=True),
    "smoothed": Case(lambda: bert(BertForSequenceClassification), of_sequences(), most=0.45, smoothing=0.1),
    "smoothed-causal": Case(llama, of_tokens(VOCABULARY), most=0.8, shifted=True, smoothing=0.1),
}


def updates(samples: list[Batch], size: int, accumulated: int, ranks: int = 1) -> list[list[Update]]:
    """The micro-batches of each update of an epoch, in order, those of each rank by themselves."""
    batches = [
        {name: torch.stack([sample[name] for sample in samples[i : i + size]]) for name in samples[0]}
        for i in range(0, len(samples), size)
    ]
    of_rank = [batches[rank::ranks] for rank in range(ranks)]
    return [[ours[i : i + accumulated] for ours in of_rank] for i in range(0, len(of_rank[0]), accumulated)]


@dataclass
class Trained:
    losses: list[float]
    """Of the descent, at w."""
    norms: list[float]
    """Of the descent's gradient, before it is clipped."""
    lengths: list[float]
    """Of the ascent's gradient, the last rank's."""


def train(
    model: nn.Module,
    case: Case,
    schedule: list[list[Update]],
    base: torch.optim.Optimizer,
    *,
    bilevel: bool,
    rho: float,
    together: bool = False,
) -> Trained:
    """Two passes over the micro-batches of each update; the gradient of the second is clipped; the rate falls to 0.

    Each rank perturbs by the gradient of its own micro-batches, or all do `together`.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    rate, trained = base.param_groups[0]["lr"], Trained([], [], [])

    def gradient(loss: Callable[[nn.Module, Batch, Update], Tensor], ours: Update, update: Update) -> list[Tensor]:
        found = [torch.zeros_like(param) for param in params]
        for batch in ours:
            more = torch.autograd.grad(loss(model, batch, update), params, allow_unused=True)
            found = [total if own is None else total + own for total, own in zip(found, more, strict=True)]
        return found

    for number, of_ranks in enumerate(schedule):
        update = [batch for ours in of_ranks for batch in ours]
        weights = [param.detach().clone() for param in params]
        with torch.no_grad():
            trained.losses.append(sum(case.descent(model, batch, update).item() for batch in update))
        descent = [torch.zeros_like(param) for param in params]
        for ours in of_ranks:
            ascent = gradient(case.bound if bilevel else case.descent, update if together else ours, update)
            length = torch.cat([one.flatten() for one in ascent]).norm()
            with torch.no_grad():
                for param, slope in zip(params, ascent, strict=True):
                    param += rho * slope / length
            descent = [total + own for total, own in zip(descent, gradient(case.descent, ours, update), strict=True)]
            with torch.no_grad():
                for param, weight in zip(params, weights, strict=True):
                    param.copy_(weight)
        norm = torch.cat([one.flatten() for one in descent]).norm().item()
        trained.norms.append(norm)
        trained.lengths.append(length.item())
        for param, slope in zip(params, descent, strict=True):
            param.grad = slope * min(1.0, case.most / (norm + 1e-6))
        base.param_groups[0]["lr"] = rate * (1 - number / len(schedule))
        base.step()
    return trained
