"""Lightning Fabric: gradient accumulation, clipping and a schedule, with both passes over the same micro-batches.

pip install 'bisam[lightning]' scikit-learn
python examples/fabric_loop.py
"""

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bisam
from bisam.integrations.fabric import SharpnessAwareBackward

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

torch.manual_seed(0)
fabric = Fabric(devices=1)  # strategy="ddp" or precision="16-mixed" need no other lines below
fabric.launch()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
model, optimizer = fabric.setup(model, bisam.BiSAM(base, model, rho=0.05))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5 * 21)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x[500:], y[500:]), batch_size=32, shuffle=True))
backward = SharpnessAwareBackward(fabric, model, optimizer)


def loss_of(inputs, labels):
    return optimizer.criterion(model(inputs), labels) / 2  # two micro-batches are an update


for epoch in range(5):
    for number, (inputs, labels) in enumerate(loader, start=1):
        is_accumulating = number % 2 != 0 and number < len(loader)
        loss = backward(loss_of, inputs, labels, is_accumulating=is_accumulating)  # None until the update is due
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with torch.no_grad():
        error = bisam.zero_one_error(model(fabric.to_device(x[:500])), fabric.to_device(y[:500]))
    fabric.print(f"epoch {epoch + 1}: loss {loss:.3f}, test error {error:.3f}")
