"""skorch: BiSAM in a scikit-learn estimator, with clipping and a schedule by skorch's callbacks.

pip install 'bisam[skorch]' scikit-learn
python examples/skorch_classifier.py
"""

import torch
from sklearn.datasets import load_digits
from skorch.callbacks import GradientNormClipping, LRScheduler
from torch import nn

import bisam
from bisam.integrations.skorch import SharpnessAwareClassifier

digits = load_digits()
x, y = (digits.data / 16).astype("float32"), digits.target

torch.manual_seed(0)
net = SharpnessAwareClassifier(
    nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    criterion=nn.CrossEntropyLoss,
    optimizer=bisam.BiSAM,
    optimizer__rho=0.05,
    optimizer__base=torch.optim.SGD,
    optimizer__momentum=0.9,
    lr=0.1,
    max_epochs=5,
    batch_size=64,
    iterator_train__shuffle=True,
    callbacks=[GradientNormClipping(1.0), LRScheduler(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)],
    verbose=0,
)
net.fit(x[500:], y[500:])
for epoch, loss in enumerate(net.history[:, "train_loss"], start=1):
    print(f"epoch {epoch}: loss {loss:.3f}")
print(f"test error {1 - net.score(x[:500], y[:500]):.3f}")
