"""The whole step as one CUDA graph, with a schedule and a generator for dropout; without a GPU it runs eagerly.

pip install bisam scikit-learn
python examples/captured_step.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import bisam

device = "cuda" if torch.cuda.is_available() else "cpu"
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
y = torch.tensor(digits.target, device=device)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Dropout(0.3),
    nn.Linear(32 * 36, 10),
).to(device)
base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = bisam.BiSAM(base, model, rho=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)

flips = torch.zeros((), device=device)  # adds up on the device, inside of the graph
step = bisam.capture(
    optimizer,
    generator=torch.Generator(device).manual_seed(0),
    after=lambda optimizer: flips.add_(optimizer.telemetry.flips),
)
print("steps are", "captured" if step.eager_because is None else f"eager: {step.eager_because}")
for epoch in range(3):
    for rows in torch.randperm(len(x), device=device).split(128):
        loss = step(x[rows], y[rows])
    scheduler.step()
    print(f"epoch {epoch + 1}: loss {loss:.3f}, {flips:.0f} samples turned from right to wrong")
    flips.zero_()
