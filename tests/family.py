"""What is tested: variants, base optimizers, the pairs of them that tests run on, and the nets and batches."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bisam
from bisam.engine.combined import Combined


def own_phi(x: Tensor) -> Tensor:
    return -nn.functional.softplus(-x) / 3


def of_the_docs():
    """The variant that docs/extending.md builds, outside of the package."""
    text = (Path(__file__).parent.parent / "docs/extending.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    return names["halfway_sam"]


# The whole family, each with the three objectives of the ascent. The values are what a user would write.
KINDS = {
    "SAM": bisam.SAM,
    "ASAM": bisam.ASAM,
    "ESAM": bisam.ESAM,
    "KSAM": bisam.KSAM,
    "RSAM": bisam.RSAM,
    "GSAM": bisam.GSAM,
    "LookSAM": lambda *args, **options: bisam.LookSAM(*args, **{"every": 2, **options}),
    "FriendlySAM": bisam.FriendlySAM,
    "VaSSO": bisam.VaSSO,
    "FisherSAM": bisam.FisherSAM,
    "WSAM": bisam.WSAM,
    "docs": of_the_docs(),
    "mSAM": lambda *args, **options: bisam.SAM(*args, **{"micro_batch": 6, **options}),
    "periodic": lambda *args, **options: bisam.SAM(*args, **{"every": 2, **options}),
}
NAMED = {"SAM": bisam.BiSAM, "ASAM": bisam.ABiSAM, "ESAM": bisam.EBiSAM}


def _with_ascent(kind, phi):
    if kind in NAMED:
        return lambda *args, **options: NAMED[kind](*args, **({} if phi == "log" else {"phi": phi}), **options)
    bound = bisam.LowerBound(phi)
    return lambda *args, **options: KINDS[kind](*args, **{"ascent": bound, **options})


def _name(kind, phi):
    return f"{NAMED[kind].__name__}({phi})" if kind in NAMED else f"{kind}({phi})"


VARIANTS = {
    **KINDS,
    **{_name(kind, phi): _with_ascent(kind, phi) for kind in KINDS for phi in ("log", "tanh")},
    "ASAM(eta)": lambda *args, **options: bisam.ASAM(*args, **{"eta": 0.01, **options}),
    "BiSAM(own)": lambda *args, **options: bisam.BiSAM(*args, phi=own_phi, mu=2.0, **options),
    "MSAM": bisam.MSAM,
}


def kind_of(variant: str) -> str:
    named = {cls.__name__: kind for kind, cls in NAMED.items()}
    base = variant.split("(")[0]
    return named.get(base, base)


# The forms of a step that a variant supports: some need to see the batch, some need to run the passes themselves.
WITH_CLOSURE = [name for name in VARIANTS if kind_of(name) not in ("ESAM", "KSAM", "mSAM")]
BY_HAND = [name for name in VARIANTS if kind_of(name) in ("SAM", "ASAM", "FriendlySAM", "VaSSO", "FisherSAM")]
ALIKE_WHEN_CAPTURED = [name for name in VARIANTS if kind_of(name) != "ESAM"]  # ESAM draws on the device then
WITHOUT_MEMORY = [name for name in VARIANTS if kind_of(name) in ("SAM", "ASAM", "FisherSAM")]


def muon_and_adamw(params):
    """As Muon is meant to be used: for the matrices, and another optimizer for the rest."""
    params = [*params]
    matrices = [param for param in params if param.dim() == 2]
    others = [param for param in params if param.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=1e-2) if hasattr(torch.optim, "Muon") else torch.optim.SGD(matrices, lr=1e-2)
    return Combined([muon, torch.optim.AdamW(others, lr=1e-2)])


BASES = {
    "SGD(foreach)": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4, foreach=True),
    "SGD(loop)": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4, foreach=False),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "AdamW(fused)": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9),
    "Muon and AdamW": muon_and_adamw,
}

CAPTURED_BASES = [name for name in BASES if "Muon" not in name]  # Muon reads its learning rate on the host

# Each kind with cross entropy and with one of the bounds in turn. What is promised of a composition does not depend on
# which bound it is; every kind agrees with its reference under each of them.
COMPOSITIONS = [
    *KINDS,
    *(_name(kind, ("log", "tanh")[number % 2]) for number, kind in enumerate(KINDS)),
    "ASAM(eta)",
    "BiSAM(own)",
    "MSAM",
]
# These stand for all variants on the base optimizers beside SGD: one hands the gradient over as it is, one changes it
# in place, has a memory, and perturbs in every second step only.
REPRESENTATIVES = ("BiSAM(log)", "LookSAM(log)")


def pairs(variants) -> list[tuple[str, str]]:
    """Every variant on SGD, and every base optimizer under the representatives: not the product of both."""
    first, *others = BASES
    return [(name, first) for name in variants] + [
        (name, base) for base in others for name in REPRESENTATIVES if name in variants
    ]


def _over(variants):
    first = next(iter(BASES))
    cases = [
        pytest.param(pair, id="-".join(pair), marks=() if pair[1] == first else pytest.mark.slow)
        for pair in pairs(variants)
    ]
    return pytest.mark.parametrize("pair", cases)


over_pairs = _over(COMPOSITIONS)
"""Run a test on each `pair` of a variant and a base optimizer."""
over_closure_pairs = _over([name for name in COMPOSITIONS if name in WITH_CLOSURE])
over_hand_pairs = _over(BY_HAND)
over_plain_pairs = _over(WITHOUT_MEMORY)


def begins_at_the_weights(optimizer) -> bool:
    """Whether the first pass is at w, not at a random start near it."""
    return optimizer.perturbation.ascends_from_weights


def takes_closures(optimizer) -> bool:
    """Whether `step(closure)` is enough: it needs `minimize` to choose samples or to cut the batch."""
    return not optimizer.plan.chooses and optimizer.micro_batch is None


FEATURES, CLASSES = 6, 4


class ConvNet(nn.Module):
    """Small, and with what makes a second pass dangerous: batch statistics and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        # no bias: before a normalisation its gradient is rounding noise, which Adam would blow up to full steps
        self.conv = nn.Conv1d(1, 5, 3, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(5 * (FEATURES - 2), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.unsqueeze(1))).relu()
        return self.head(self.dropout(x.flatten(1)))


def mlp() -> nn.Module:
    """No batch statistics, so that parts of a batch add up to the whole."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, left, right, flag=True):
        return self.net(left + right if flag else left)


def batch(seed: int = 0, size: int = 16, device="cpu", dtype=torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    return x.to(device, dtype), torch.randint(CLASSES, (size,), generator=generator).to(device)


def build(variant="BiSAM(log)", base="SGD(foreach)", *, net=ConvNet, device="cpu", dtype=torch.float32, **options):
    """A model and its sharpness-aware optimizer, always with the same initial weights."""
    torch.manual_seed(0)
    model = net().to(device, dtype)
    return model, VARIANTS[variant](BASES[base](model.parameters()), model, **options)


def closure_of(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = optimizer.criterion(model(x), y)
        loss.backward()
        return loss

    return closure


def plain_step(model, base, x, y):
    """The base optimizer on its own."""
    base.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    base.step()


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Everything that training changes: weights, buffers, the base optimizer's state."""
    state = [value for p in model.parameters() for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers(), *state]]


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_identical(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Bit for bit."""
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else a == b


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def perturb(model, optimizer, *data):
    x, y = data or batch()
    optimizer.criterion(model(x), y).backward()
    optimizer.ascend()
    return optimizer


class ScheduleFree(torch.optim.SGD):
    """With modes, as schedule-free optimizers have."""

    mode = ""

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"


def steps(optimizer, seeds, **options):
    return [optimizer.minimize(*batch(seed), **options) for seed in seeds]


def distance(a, b):
    return torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)]).norm().item()


class WithScalar(nn.Module):
    """A temperature without dimensions, and a layer that the loss does not depend on."""

    def __init__(self):
        super().__init__()
        self.net, self.unused = mlp(), nn.Linear(6, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.net(x) * self.temperature


class Skipping(nn.Module):
    """With a layer that some steps skip, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.head, self.skips = nn.Linear(6, 4, bias=False), False

    def forward(self, x):
        x = self.first(x).tanh()
        return self.head(x if self.skips else x + self.second(x).tanh())
