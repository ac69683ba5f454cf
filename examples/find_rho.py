"""Which ρ? A short sweep on one's own model and data, and then the training with what it chose.

pip install bisam scikit-learn
python examples/find_rho.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bisam

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
torch.manual_seed(0)
noisy = torch.rand(len(y)) < 0.5  # half of the labels are drawn anew: there is something not to learn by heart
y[noisy] = torch.randint(10, (int(noisy.sum()),))
order = torch.randperm(len(x))
validation, train = order[:500], order[500:800]
loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=100, shuffle=True)


def make_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def make_optimizer(model, rho):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    return bisam.BiSAM(base, model, rho=rho)


found = bisam.find_rho(
    make_model,
    make_optimizer,
    loader,
    [(x[validation], y[validation])],
    rhos=(0, 0.1, 0.2, 0.5, 1),
    steps=100,
)
print(found, end="\n\n")

model = make_model()
optimizer = make_optimizer(model, found.rho)
for epoch in range(30):
    losses = [optimizer.minimize(inputs, labels) for inputs, labels in loader]
    if epoch % 10 == 9:
        print(f"epoch {epoch + 1} with ρ = {found.rho:g}: loss {torch.stack(losses).mean():.3f}")
