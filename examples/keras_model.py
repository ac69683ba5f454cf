"""Keras 3 on torch: BiSAM in `fit`, with accumulation, clipping and a schedule by Keras' optimizer.

pip install 'bisam[keras]' scikit-learn
python examples/keras_model.py
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
from sklearn.datasets import load_digits

from bisam.integrations.keras import SharpnessAwareModel

digits = load_digits()
x, y = (digits.data / 16).astype("float32"), digits.target

keras.utils.set_random_seed(0)
inputs = keras.Input((64,))
hidden = keras.layers.Dense(128, activation="relu")(inputs)
model = SharpnessAwareModel(inputs, keras.layers.Dense(10)(hidden))
model.compile(
    keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, decay_steps=5 * 41),
        momentum=0.9,
        global_clipnorm=1.0,
        gradient_accumulation_steps=2,
    ),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    method="bisam-log",
    rho=0.05,
)
history = model.fit(x[500:], y[500:], batch_size=32, epochs=5, verbose=0).history
for epoch, loss in enumerate(history["loss"], start=1):
    print(f"epoch {epoch}: loss {loss:.3f}")
print(f"test error {1 - model.evaluate(x[:500], y[:500], verbose=0)[1]:.3f}")
