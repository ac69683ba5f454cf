"""timm: fine-tune a model with BiSAM, its call of the loss scaler as in timm's training script.

pip install 'bisam[timm]' scikit-learn
python examples/timm_finetuning.py
"""

from functools import partial

import timm
import timm.optim
import torch
from sklearn.datasets import load_digits

import bisam
from bisam.integrations.timm import SharpnessAwareScaler

digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
x = torch.nn.functional.interpolate(x, size=32)
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
# pretrained=True loads weights from timm's hub
model = timm.create_model("test_resnet", in_chans=1, num_classes=10).to(device)
base = timm.optim.create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
optimizer = bisam.BiSAM(base, model, rho=0.05)
loss_scaler = SharpnessAwareScaler(device, enabled=device == "cuda")
accum_steps = 2


def loss_of(inputs, labels):
    with torch.autocast(device, torch.float16, enabled=device == "cuda"):
        return optimizer.criterion(model(inputs), labels) / accum_steps


for epoch in range(3):
    for number, rows in enumerate(torch.randperm(1280).split(32), start=1):
        need_update = number % accum_steps == 0
        inputs, labels = x[500:][rows].to(device), y[500:][rows].to(device)
        loss = loss_scaler(
            partial(loss_of, inputs, labels), optimizer, clip_grad=1.0, parameters=model.parameters(),
            need_update=need_update,
        )  # fmt: skip
        if need_update:
            optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {loss:.3f}")
