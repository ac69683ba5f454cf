"""Lightning: a module whose optimizer is BiSAM, with the Trainer's accumulation and clipping.

pip install 'bisam[lightning]' scikit-learn
python examples/lightning_module.py
"""

import logging
import warnings

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bisam
from bisam.integrations.lightning import SharpnessAwareModule

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Digits(SharpnessAwareModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.sharpness_loss(self.net(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("error", bisam.zero_one_error(self.net(x), y))

    def on_train_epoch_end(self):
        logged = self.trainer.callback_metrics
        print(f"epoch {self.current_epoch + 1}: loss {logged['train_loss']:.3f}, test error {logged['error']:.3f}")

    def configure_optimizers(self):
        base = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        return bisam.BiSAM(base, self, rho=0.05)


digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train = DataLoader(TensorDataset(x[500:], y[500:]), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(x[:500], y[:500]), batch_size=500)

lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    max_epochs=5, accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="auto", devices=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Digits(), train, test)
