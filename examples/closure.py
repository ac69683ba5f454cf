"""A training loop with a closure, as for LBFGS: the criterion is Q on the way up and cross entropy on the way down.

pip install bisam scikit-learn
python examples/closure.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import bisam

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
test, train = slice(0, 500), slice(500, None)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
optimizer = bisam.BiSAM(base, model, rho=0.05)

for epoch in range(5):
    for rows in torch.randperm(len(x[train])).split(64):
        inputs, labels = x[train][rows], y[train][rows]

        def closure(inputs=inputs, labels=labels):
            optimizer.zero_grad()
            loss = optimizer.criterion(model(inputs), labels)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    with torch.no_grad():
        error = bisam.zero_one_error(model(x[test]), y[test])
    measured = optimizer.telemetry
    print(f"epoch {epoch + 1}: loss {loss:.3f}, test error {error:.3f}, flips in the last batch {measured.flips}")
