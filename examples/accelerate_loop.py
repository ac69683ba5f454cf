"""Accelerate: gradient accumulation, clipping and a schedule, with both passes over the same micro-batches.

pip install 'bisam[accelerate]' scikit-learn
python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bisam
from bisam.integrations.accelerate import SharpnessAwareBackward

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
optimizer = bisam.BiSAM(base, model, rho=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5 * 21)
loader = DataLoader(TensorDataset(x[500:], y[500:]), batch_size=32, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
backward = SharpnessAwareBackward(accelerator, model, optimizer)


def loss_of(inputs, labels):
    return backward.criterion(model(inputs), labels)


for epoch in range(5):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = backward(loss_of, inputs, labels)  # None until the update is due
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with torch.no_grad():
        error = bisam.zero_one_error(model(x[:500].to(accelerator.device)), y[:500].to(accelerator.device))
    accelerator.print(f"epoch {epoch + 1}: loss {loss:.3f}, test error {error:.3f}")
