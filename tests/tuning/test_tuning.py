"""`find_rho`: its trainings are comparable, it restores what it used, and it claims no more than the data show."""

import math
import random
import re
import statistics
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bisam
from bisam.plan import Batch
from bisam.tuning import student
from bisam.tuning.training import Outcome, _is_finite, _look
from bisam.tuning.verdict import judge

from family import CLASSES, FEATURES, VARIANTS, ConvNet, assert_identical, batch, mlp, plain_step, tensors

ROOT = Path(__file__).parents[2]


def sam(model, rho, **options):
    return bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, rho=rho, **options)


def loader(size=64, **options):
    return DataLoader(TensorDataset(*batch(size=size)), 16, shuffle=True, **options)


def sweep(model=mlp, make_optimizer=sam, train=None, validation=None, **options):
    """A small sweep, all of whose arguments have defaults."""
    train = [batch(0), batch(1)] if train is None else train
    validation = [batch(2, size=40)] if validation is None else validation
    return bisam.find_rho(model, make_optimizer, train, validation, **{"rhos": (0, 0.1), "repeats": 2, **options})


class Averaging(torch.optim.SGD):
    """As schedule-free optimizers: steps in train mode only; other weights are evaluated than trained."""

    modes: ClassVar[list[str]] = []
    mode = "eval"

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"
        self.modes.append("eval")

    def step(self, closure=None):
        assert self.mode == "train"
        return super().step(closure)


def test_a_base_optimizer_with_modes_is_switched_for_training_and_validation():
    Averaging.modes.clear()
    sweep(make_optimizer=lambda model, rho: bisam.SAM(Averaging(model.parameters(), lr=0.1), model, rho=rho))
    assert len(Averaging.modes) == 4  # two values of ρ, two repeats


# Trainings are comparable.


class Augmented(Dataset):
    """Samples that change a little whenever they are read, by torch's and by Python's random numbers."""

    def __init__(self):
        self.x, self.y = batch(size=64)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.x[index] + 0.3 * torch.randn(FEATURES) + 0.3 * random.random(), self.y[index]


class Idle(nn.Module):
    """Has a parameter without influence: perturbing that one alone is what the base optimizer does."""

    def __init__(self):
        super().__init__()
        self.net, self.idle = ConvNet(dropout=0.5), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.net(x) + 0 * self.idle


def perturbing_the_idle_one(model, rho):
    def draw_more_the_larger_rho(*_):
        torch.rand(round(10 * rho))
        random.getrandbits(1 + round(1000 * rho))

    groups = [{"params": [*model.net.parameters()], "rho": 0.0}, {"params": [model.idle]}]
    optimizer = bisam.SAM(torch.optim.SGD(groups, lr=0.1), model, rho=rho, same_dropout=True)
    optimizer.register_step_post_hook(draw_more_the_larger_rho)
    return optimizer


@pytest.mark.parametrize("own_generator", [False, True])
def test_every_rho_has_the_same_batches_augmentation_and_dropout_and_repeats_differ(own_generator):
    generator = torch.Generator().manual_seed(5) if own_generator else None
    train = DataLoader(Augmented(), 16, shuffle=True, generator=generator)
    found = sweep(Idle(), perturbing_the_idle_one, train, rhos=(0, 0.1, 1.0), epochs=2)
    assert len({(point.accuracies, point.losses) for point in found.points}) == 1
    assert len(set(found.best.losses)) == 2
    assert found.steps == 8


def test_rho_zero_is_the_base_optimizer_bit_for_bit():
    model, trained = ConvNet(), []

    def make_optimizer(copied, rho):
        optimizer = sam(copied, rho)
        trained.append((rho, copied, optimizer))
        return optimizer

    found = sweep(model, make_optimizer, epochs=3, repeats=1)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for x, y in (batch(0), batch(1)):
            plain_step(model.train(), base, x, y)
    _, ours, optimizer = next(one for one in trained[2:] if one[0] == 0)  # after a rehearsal of both
    assert_identical(tensors(ours, optimizer), tensors(model, base))
    x, y = batch(2, size=40)
    with torch.no_grad():
        output = model.eval()(x)
    assert found.points[0].losses == (nn.functional.cross_entropy(output, y).item(),)
    assert found.points[0].accuracy == pytest.approx(1 - bisam.zero_one_error(output, y).item(), abs=1e-7)


def test_a_model_function_gives_new_weights_for_each_repeat_and_the_same_for_each_rho():
    starts = {}

    def make_optimizer(model, rho):
        starts.setdefault(model[0].weight.sum().item(), []).append(rho)
        return sam(model, rho)

    sweep(mlp, make_optimizer, repeats=3)
    assert sorted(map(sorted, starts.values())) == [[0, 0, 0.1, 0.1], [0, 0.1], [0, 0.1]]  # with a rehearsal of both


def test_an_optimizer_draws_the_same_random_numbers_for_every_rho_of_a_repeat():
    draws = []

    def make_optimizer(model, rho):
        draws.append((torch.rand(()).item(), torch.initial_seed()))  # a variant's own generator begins with that seed
        return sam(model, rho)

    sweep(mlp, make_optimizer)
    assert len(set(draws[:4])) == 1  # with a rehearsal of both
    assert len(set(draws[4:])) == 1
    assert draws[0] != draws[-1]


def test_another_seed_gives_other_trainings_and_the_same_seed_the_same():
    first, again, other = (sweep(train=loader(), seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.points[0].losses != other.points[0].losses


@pytest.mark.parametrize("part", ["train", "validation"])
def test_data_that_changes_between_trainings_is_refused(part):
    class Changing:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([batch(self.passes)])

    with pytest.raises(ValueError, match=f"{part}_batches gave other samples"):
        sweep(**{part: Changing()})


def test_trainings_are_paired_also_with_a_loader_that_draws_more_at_its_first_start():
    class Persistent:
        started = False

        def __iter__(self):
            if not self.started:
                torch.rand(1)
            self.started = True
            x, y = batch(size=64)
            return iter([(x[rows], y[rows]) for rows in torch.randperm(64).split(16)])

    found = sweep(Idle(), perturbing_the_idle_one, Persistent())
    assert found.points[0].losses == found.points[1].losses


def test_steps_decide_the_length_in_place_of_epochs():
    seen = []

    def make_optimizer(model, rho):
        optimizer = sam(model, rho)
        optimizer.register_step_post_hook(lambda *_: seen.append(rho))
        return optimizer

    found = sweep(make_optimizer=make_optimizer, steps=5, repeats=1)
    assert seen == [0] * 5 + [0.1] * 5
    assert found.steps == 5


# Model and random numbers are restored.


def used_net():
    """Batch statistics, dropout, a frozen parameter, mixed modes, gradients of an earlier pass, and a negative zero."""
    model = ConvNet(dropout=0.5)
    nn.functional.cross_entropy(model(batch()[0]), batch()[1]).backward()
    model.norm.weight.requires_grad_(False)
    model.norm.eval()
    model.head.weight.data[0, 0] = -0.0
    return model


def state_of(model, *generators):
    """All that must be restored, bit for bit."""
    return [
        *(tensor.detach().clone().view(-1).view(torch.uint8) for tensor in model.state_dict().values()),
        *(param.grad.clone() for param in model.parameters() if param.grad is not None),
        torch.tensor([module.training for module in model.modules()]),
        torch.tensor([param.requires_grad for param in model.parameters()]),
        torch.get_rng_state(),
        *(generator.get_state() for generator in generators),
        torch.tensor(random.getstate()[1]),
        *([] if not torch.cuda.is_initialized() else torch.cuda.get_rng_state_all()),
    ]


@pytest.mark.parametrize("as_function", [False, True])
def test_model_and_random_numbers_are_restored_bit_for_bit(as_function, device):
    model, generator = used_net().to(device), torch.Generator()
    before = state_of(model, generator)
    sweep((lambda: model) if as_function else model, train=loader(generator=generator))
    assert_identical(before, state_of(model, generator))


@pytest.mark.parametrize("ticks", [0, 1, 5])
def test_model_and_random_numbers_are_restored_after_an_exception(ticks):
    model, generator, left = used_net(), torch.Generator(), ticks

    def progress(*_):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    before = state_of(model, generator)
    with pytest.raises(KeyboardInterrupt):
        sweep(model, train=loader(generator=generator), progress=progress)
    assert_identical(before, state_of(model, generator))


def test_a_backward_pass_works_after_a_sweep_that_ran_between_it_and_its_forward_pass():
    model, (x, y) = mlp(), batch()
    loss = nn.functional.cross_entropy(model(x), y)
    sweep(model)
    loss.backward()


# Any variant, model and data.


def test_every_variant_can_be_swept(variant):
    def make_optimizer(model, rho):
        return VARIANTS[variant](torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, rho=rho)

    found = sweep(mlp, make_optimizer, repeats=1)
    assert found.points[0].losses != found.points[1].losses


def test_an_optimizer_built_without_its_model_is_given_it():
    def make_optimizer(model, rho):
        return bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=rho)

    assert sweep(ConvNet, make_optimizer) == sweep(ConvNet)


def test_inputs_may_be_dicts_outputs_may_have_logits_and_labels_may_be_ignored():
    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Pixels(nn.Module):
        """(N, F) → logits (N, K, 3)."""

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(FEATURES, 3 * CLASSES)

        def forward(self, left, right):
            return Output(self.head(left + right).unflatten(1, (CLASSES, 3)))

    x, y = batch(size=30)
    labels = torch.stack([y, y, y.flip(0)], dim=1).masked_fill(torch.rand(30, 3) < 0.3, -100)
    kept = []

    def make_optimizer(model, rho):
        kept.append(model)
        return sam(model, rho)

    data = ({"left": x / 2, "right": x / 2}, labels)
    found = sweep(Pixels, make_optimizer, data, [data], repeats=1)
    with torch.no_grad():
        logits = kept[-1](x / 2, x / 2).logits
    assert found.points[-1].accuracy == pytest.approx(1 - bisam.zero_one_error(logits, labels).item(), abs=1e-6)
    assert found.points[-1].loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item())


@pytest.mark.parametrize("shape", [(30,), (30, 3)])
def test_a_validation_sample_with_several_labels_counts_as_one_sample(shape):
    """Its labels are not independent."""
    model = nn.Sequential(nn.Linear(FEATURES, 3 * CLASSES), nn.Unflatten(1, (CLASSES, 3))) if len(shape) > 1 else mlp()
    x, labels = batch(size=30)[0], torch.randint(CLASSES, shape)
    labels[0] = -100
    look = _look(model, sam(model, 0.1), Batch(x, labels))
    right = (model(x).argmax(1) == labels).reshape(30, -1).sum(1)
    assert look.right.tolist() == right.tolist()
    assert look.counted == labels.numel() - labels[0].numel()


def test_the_accuracy_on_a_single_validation_sample_is_zero_or_one():
    model, x = mlp(), batch()[0][:1]
    data = [(x, torch.tensor([label])) for label in range(CLASSES)]
    found = [sweep(model, validation=[one], repeats=1, steps=1).points[0].accuracy for one in data]
    assert sorted(found) == [0.0, 0.0, 0.0, 1.0]


def test_the_default_is_the_usual_grid_with_three_repeats():
    found = bisam.find_rho(mlp, sam, [batch(0)], [batch(1)], steps=1)
    assert [point.rho for point in found.points] == [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
    assert (found.repeats, found.steps) == (3, 1)
    again = bisam.find_rho(mlp, sam, [batch(0)], [batch(1)], steps=1, seed=0)
    assert again == found


def test_validation_runs_in_evaluation_mode_and_in_the_precision_of_the_training():
    seen = set()

    class Recording(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            seen.add((self.training, torch.is_grad_enabled(), self.net(x).dtype))
            return self.net(x)

    sweep(Recording().eval(), lambda model, rho: sam(model, rho, autocast=torch.bfloat16))
    assert seen == {(True, True, torch.bfloat16), (False, False, torch.bfloat16)}


@pytest.mark.parametrize("sized", [True, False])
def test_progress_increases_up_to_its_total(sized):
    class Unsized:
        def __iter__(self):
            return iter([batch(0), batch(1)])

    seen = []
    make_optimizer = explodes_from(0.2)
    train = [batch(0), batch(1)] if sized else Unsized()
    sweep(mlp, make_optimizer, train, rhos=(0, 0.1, 0.2), progress=lambda *counts: seen.append(counts))
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(set(done))
    assert set(totals) == {done[-1]} == {2 * 3 * (3 if sized else 1)}


# The choice.


class Slope(nn.Module):
    """The logits of class 1 lead by w − x: of validation inputs x labelled 1, those up to w are right."""

    def __init__(self, start=-0.001):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x):
        lead = self.w - x
        return torch.stack([torch.zeros_like(lead), lead], dim=1)


def cubic(logits, _):
    """L = w²/2 + w³/3, where x = 0. From just below 0, one step of rate 1 with ρ leads to about ρ (1 − ρ)."""
    w = logits[:, 1].mean()
    return w**2 / 2 + w**3 / 3


ORIGIN = (torch.zeros(1, dtype=torch.float64), torch.tensor([1]))
LADDER = (torch.linspace(0, 0.5, 501, dtype=torch.float64), torch.ones(501, dtype=torch.long))


def on_the_cubic(model, rho):
    return bisam.SAM(torch.optim.SGD(model.parameters(), lr=1.0), model, rho=rho, descent=cubic)


def sweep_the_cubic(*rhos):
    return sweep(Slope, on_the_cubic, ORIGIN, LADDER, rhos=rhos, repeats=1)


def test_the_best_rho_is_found_where_it_is_known():
    found = sweep_the_cubic(0.9, 0, 0.1, 0.3, 0.5, 0.7)
    assert found.rho == 0.5
    assert [point.rho for point in found.points] == [0, 0.1, 0.3, 0.5, 0.7, 0.9]
    for point in found.points[1:]:
        reached = -0.001 + (point.rho + 0.001) * (1 - point.rho - 0.001)
        assert point.accuracy == pytest.approx(reached * 1000 / 501, abs=2 / 501)
    assert found.best.behind == 0
    assert found.points[2].behind == pytest.approx(found.best.accuracy - found.points[2].accuracy)


def test_at_the_edge_of_the_grid_the_next_values_are_suggested():
    assert "ρ = 0.3 is the largest of the grid: try 0.5 and 1 too." in sweep_the_cubic(0, 0.1, 0.3).remarks
    assert "ρ = 0.5 is the smallest of the grid: try 0.2, 0.1 and 0 too." in sweep_the_cubic(0.5, 0.7).remarks
    assert "of the grid" not in str(sweep_the_cubic(0.3, 0.5, 0.7))
    assert "of the grid" not in str(judged({0: [0.9], 0.1: [0.1]}))


def outcomes_of(accuracies, losses=None, samples=100):
    """Outcomes of trainings with these accuracies: the first samples are right."""
    losses = losses or [float(number) for number in range(len(accuracies))]
    shares = [(torch.arange(samples) < round(accuracy * samples)).double() for accuracy in accuracies]
    return [Outcome(share, loss) for share, loss in zip(shares, losses, strict=True)]


def judged(accuracies, losses=None, samples=100):
    losses = losses or {}
    return judge({rho: outcomes_of(every, losses.get(rho), samples) for rho, every in accuracies.items()}, steps=7)


def test_ties_in_accuracy_are_broken_by_the_lower_loss_and_then_by_the_smaller_rho():
    # 60 of 300 samples each, though floating-point means of the three are not all the same
    accuracies = {0.05: [0.01, 0.01, 0.58], 0.1: [0.2, 0.2, 0.2], 0.2: [0.01, 0.01, 0.58]}
    assert len({statistics.fmean(every) for every in accuracies.values()}) == 2
    found = judged(accuracies, {0.05: [2.0, 2.0, 2.0], 0.1: [1.0, 2.0, 2.0], 0.2: [1.0, 2.0, 2.0]})
    assert found.rho == 0.1
    assert "ρ = 0.05 and 0.2 had the same accuracy, and no lower loss." in found.remarks[0]
    assert "had the same accuracy" not in judged({0.05: [0.1, 0.3], 0.1: [0.2, 0.1]}).remarks[0]


# What cannot be distinguished.


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (30, 2.0423), (120, 1.9799)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(freedom, expected):
    assert student.quantile(0.95, freedom) == pytest.approx(expected, abs=5e-5)
    assert student.quantile(0.95, freedom + 0.9) == student.quantile(0.95, freedom)
    assert student.quantile(0.95, 10**9) == student.quantile(0.95, 200) == pytest.approx(1.9719, abs=5e-5)
    assert student.quantile(0.95, 0.5) == student.quantile(0.95, 1)


def whole_samples(*accuracies, samples=50):
    """Repeats in which all samples have the same share of right labels: only the repeats scatter."""
    return [Outcome(torch.full((samples,), value, dtype=torch.float64), loss) for loss, value in enumerate(accuracies)]


@pytest.mark.parametrize("samples", [50, 1])  # of one sample the samples have no variance
def test_where_only_repeats_scatter_the_interval_is_that_of_paired_differences(samples):
    worse, best = whole_samples(0.5, 0.6, 0.7, samples=samples), whole_samples(0.62, 0.7, 0.84, samples=samples)
    found = judge({0: worse, 0.1: best}, steps=7)
    # gaps 0.12, 0.10, 0.14: mean 0.12, standard deviation 0.02, t of two degrees of freedom 4.3027
    assert found.points[0].behind == pytest.approx(0.12)
    assert found.points[0].margin == pytest.approx(4.3027 * 0.02 / math.sqrt(3), rel=1e-4)
    assert found.indistinguishable == ()
    assert "better than every other" in found.remarks[1]
    unpaired = judge({0: whole_samples(0.5, 0.6, 0.7), 0.1: whole_samples(0.84, 0.62, 0.7)}, steps=7)
    assert unpaired.indistinguishable == (0,)


def test_where_only_samples_scatter_the_interval_has_their_degrees_of_freedom():
    def outcomes(*shares):
        return [Outcome(torch.tensor(shares, dtype=torch.float64), loss) for loss in (1.0, 2.0, 3.0)]

    found = judge({0: outcomes(0, 1, 0, 0), 0.1: outcomes(1, 1, 1, 0)}, steps=7)
    # gaps 1, 0, 1 and 0 in every repeat: mean ½, variance ⅓, t of three degrees of freedom 3.1824
    assert found.points[0].behind == pytest.approx(0.5)
    assert found.points[0].margin == pytest.approx(3.1824 * math.sqrt(1 / 3 / 4), rel=1e-4)


def test_with_few_validation_samples_differences_stay_open_even_if_the_repeats_agree():
    many = judged({0: [0.5, 0.5, 0.5], 0.1: [0.56, 0.56, 0.57]}, samples=1000)
    few = judged({0: [0.5, 0.5, 0.5], 0.1: [0.56, 0.56, 0.56]}, samples=50)
    assert many.indistinguishable == ()
    assert few.indistinguishable == (0,)


def test_trainings_that_are_right_on_the_same_samples_are_not_distinguished():
    found = judged({0: [0.5, 0.6, 0.7], 0.1: [0.5, 0.6, 0.7]}, {0.1: [3.0, 4.0, 5.0]})
    assert (found.points[1].behind, found.points[1].margin) == (0.0, 0.0)
    assert found.indistinguishable == (0.1,)


def test_accuracies_are_compared_sample_by_sample():
    def right(samples):
        return [Outcome(torch.zeros(100, dtype=torch.float64).index_fill_(0, samples, 1), loss) for loss in (1.0, 2.0)]

    best = right(torch.arange(58))
    same = judge({0: right(torch.arange(50)), 0.1: best}, steps=7)
    others = judge({0: right(torch.arange(50, 100)), 0.1: best}, steps=7)
    assert same.points[0].behind == others.points[0].behind == pytest.approx(0.08)
    assert same.indistinguishable == ()
    assert others.indistinguishable == (0,)


def test_equal_methods_are_distinguished_at_most_once_in_twenty_times():
    generator = torch.Generator().manual_seed(0)

    def drawn():
        return [Outcome((torch.rand(80, generator=generator) < 0.7).double(), loss) for loss in (1.0, 2.0, 3.0)]

    found = [judge({0: drawn(), 0.1: drawn()}, steps=7) for _ in range(200)]
    assert sum(not one.indistinguishable for one in found) <= 10


def test_with_one_repeat_no_two_values_are_distinguished():
    found = judged({0: [0.1], 0.1: [0.9]})
    assert found.rho == 0.1
    assert found.indistinguishable is None
    assert found.points[0].is_distinguishable is None
    assert "one repeat the scatter is unknown" in str(found)


def test_repeats_in_which_nothing_was_random_count_as_one():
    found = sweep(mlp().eval(), rhos=(0, 0.1, 3.0), epochs=5, repeats=3)
    assert len(set(found.best.losses)) == 1
    assert found.indistinguishable is None
    assert "All repeats gave the same results" in str(found)
    assert sweep(mlp(), train=loader(), repeats=3).indistinguishable is not None


def test_the_remarks_state_when_plain_training_is_as_good():
    assert "this sweep does not show that perturbing helps" in str(judged({0: [0.5, 0.6, 0.7], 0.1: [0.6, 0.7, 0.7]}))
    assert "no perturbation did better" in str(judged({0: [0.7, 0.7, 0.8], 0.1: [0.6, 0.7, 0.7]}))
    better = str(judged({0: [0.1, 0.1, 0.1], 0.1: [0.9, 0.9, 0.9]}))
    assert "does not show" not in better
    assert "no perturbation" not in better


def test_the_table_marks_the_choice_and_the_values_that_cannot_be_distinguished_from_it():
    outcomes = {0: outcomes_of([0.1, 0.1]), 0.05: outcomes_of([0.8, 0.85]), 0.1: outcomes_of([0.9, 0.84]), 0.5: [None]}
    found = judge(outcomes, steps=7)
    lines = str(found).split("\n")
    # of ρ = 0: gaps of 80 and 74 of 100 samples, so the squared standard errors are 0.0009 (repeats) and 0.001637
    # (samples), the degrees of freedom 7.7, and t of seven is 2.365
    assert lines[:6] == [
        "      ρ  accuracy, %   loss    behind, %",
        "      0   10.0 ± 0.0  0.500  77.0 ± 11.9",
        "~  0.05   82.5 ± 3.5  0.500   4.5 ± 72.2",
        "→   0.1   87.0 ± 4.2  0.500",
        "    0.5     diverged",
        "",
    ]
    assert lines[6:] == list(found.remarks)
    assert found.remarks == (
        "ρ = 0.1 has the best mean accuracy, 87.0 %, after 7 steps, 2 repeats.",
        "~ ρ = 0.05 cannot be distinguished from it.",
        "ρ = 0.5 diverged: weights or loss were not finite any more.",
        "This ranks ρ after a short training; for a long one the best may be larger or smaller.",
    )


# Trainings that diverge.


def explodes_from(rho_of_explosion, seen=None):
    def make_optimizer(model, rho):
        rate = math.inf if rho >= rho_of_explosion else 0.1
        optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), model, rho=rho)
        if seen is not None:
            optimizer.register_step_post_hook(lambda *_: seen.append(rho))
        return optimizer

    return make_optimizer


def test_a_diverging_rho_is_stopped_early_not_repeated_and_never_chosen():
    seen = []
    found = sweep(mlp, explodes_from(0.1, seen), steps=50, rhos=(0, 0.1, 0.2))
    assert found.rho == 0
    assert [point.diverged for point in found.points] == [False, True, True]
    assert math.isnan(found.points[1].accuracy)
    assert math.isnan(found.points[1].loss)
    assert found.points[1].is_distinguishable is None
    assert seen.count(0) == 100
    assert 0 < seen.count(0.1) <= 10
    assert found.steps == 50
    assert "ρ = 0.1 and 0.2 diverged" in str(found)


def test_a_rho_that_diverges_in_one_repeat_only_is_never_chosen():
    found = judge({0: outcomes_of([0.1, 0.2]), 0.1: [*outcomes_of([0.9]), None]}, steps=7)
    assert found.rho == 0
    assert found.points[1].diverged
    assert found.points[1].accuracies == (0.9,)


def test_a_validation_loss_that_is_not_finite_counts_as_diverged():
    class Breaking(Slope):
        def forward(self, x):
            return super().forward(x) * (math.nan if not self.training and self.w > 0.2 else 1.0)

    found = sweep(Breaking, on_the_cubic, ORIGIN, LADDER, rhos=(0.1, 0.5), repeats=1)
    assert [point.diverged for point in found.points] == [False, True]
    assert found.rho == 0.1


def test_weights_that_are_not_finite_count_as_diverged_whatever_the_validation_loss():
    class Mending(Slope):
        def forward(self, x):
            return super().forward(x) if self.training else super().forward(x).nan_to_num()

    found = sweep(Mending, explodes_from(0.1), ORIGIN, LADDER, rhos=(0, 0.1), repeats=1, steps=2)
    assert [point.diverged for point in found.points] == [False, True]


def test_a_single_weight_that_is_not_finite_counts_as_diverged():
    model = mlp()
    optimizer = sam(model, 0.1)
    assert _is_finite(model, optimizer)
    model[-1].bias.data[1] = math.inf
    assert not _is_finite(model, optimizer)


def test_it_is_an_error_when_every_rho_diverges():
    with pytest.raises(RuntimeError, match=r"diverged at every rho, 0 and 0\.1.*Lower the learning rate"):
        sweep(mlp, explodes_from(0))


# Mistakes are explained, before anything is trained.


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"rhos": ()}, ValueError, "rhos must be two or more values to choose from, got 0"),
        ({"rhos": (0.1,)}, ValueError, "rhos must be two or more values to choose from, got 1"),
        ({"rhos": 0.1}, TypeError, r"rhos must be several numbers, such as \(0, 0.05, 0.1\), got 0.1"),
        ({"rhos": "0.1"}, TypeError, r"rhos must be several numbers, such as \(0, 0.05, 0.1\), got '0.1'"),
        ({"rhos": (0.1, "large")}, TypeError, r"every rho must be a number, got \(0.1, 'large'\)"),
        ({"rhos": (0.1, None)}, TypeError, r"every rho must be a number, got \(0.1, None\)"),
        ({"rhos": (0.1, -0.1)}, ValueError, "every rho must be non-negative and finite, got -0.1"),
        ({"rhos": (0.1, math.nan)}, ValueError, "every rho must be non-negative and finite, got nan"),
        ({"rhos": (0.1, math.inf)}, ValueError, "every rho must be non-negative and finite, got inf"),
        ({"rhos": (0.1, 0, 0.1)}, ValueError, "every rho must be given once, got 0.1 more than once"),
        ({"epochs": 0}, ValueError, "epochs must be a whole number, at least 1, got 0"),
        ({"steps": 0}, ValueError, "steps must be a whole number, at least 1, got 0"),
        ({"epochs": 1, "steps": 1}, ValueError, "give epochs or steps, not both"),
        ({"repeats": 0}, ValueError, "repeats must be a whole number, at least 1, got 0"),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, or a function that makes one, got int"),
        ({"model": lambda: 3}, TypeError, "must return a torch.nn.Module, got int"),
        ({"train": []}, ValueError, "train_batches: the data is empty"),
        ({"validation": []}, ValueError, "validation_batches: the data is empty"),
        ({"train": iter([batch()])}, TypeError, "train_batches: .* got an iterator, .* Pass a list of batches"),
        ({"validation": iter([batch()])}, TypeError, "validation_batches: .* got an iterator"),
        ({"train": batch()[0]}, TypeError, "train_batches: data must be .* got Tensor"),
        ({"train": [batch()[0]] * 3}, TypeError, "train_batches must be .* got a batch of Tensor"),
        ({"validation": [batch()[0]] * 3}, TypeError, "validation_batches must be .* got a batch of Tensor"),
        ({"make_optimizer": lambda model, rho: sam(model, 0.1)}, ValueError, "given rho=0, .* they have 0.1. Pass rho"),
        ({"make_optimizer": lambda model, rho: sam(model, 0)}, ValueError, "given rho=0.1, .* they have 0. Pass rho"),
        (
            {"make_optimizer": sam(mlp(), 0.05)},
            TypeError,
            r"must be a function of .* got SAM\. Write def make_optimizer",
        ),
        ({"make_optimizer": lambda model, rho: sam(model, rho).base}, TypeError, "must return .* got SGD"),
        ({"progress": True}, TypeError, "progress must be a callable progress\\(done, total\\) or None, got True"),
        (
            {"make_optimizer": lambda model, rho: bisam.SAM(torch.optim.SGD(mlp().parameters()), rho=rho)},
            ValueError,
            "must build on the model that it is given",
        ),
        (
            {"make_optimizer": lambda model, rho: bisam.SAM(torch.optim.SGD(model.parameters()), mlp(), rho=rho)},
            ValueError,
            "must build on the model that it is given",
        ),
    ],
)
def test_misuse_is_explained_before_anything_is_trained(wrong, error, message):
    model, seen = mlp(), []
    before = state_of(model)
    with pytest.raises(error, match=message):
        sweep(**{"model": model, "progress": lambda *counts: seen.append(counts), **wrong})
    assert_identical(before, state_of(model))
    assert not seen


@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize("batches", [0, 1])
def test_data_that_can_be_iterated_only_once_is_refused(part, batches):
    class Once:
        def __init__(self):
            self.left = [batch()] * batches

        def __iter__(self):
            while self.left:
                yield self.left.pop()

    with pytest.raises(ValueError, match=f"{part}_batches gave no batches: .* Pass a list of batches or a DataLoader"):
        sweep(**{part: Once()})


def test_a_regression_is_refused():
    data = (batch()[0], torch.randn(16, CLASSES))
    with pytest.raises(ValueError, match="find_rho compares accuracies"):
        sweep(mlp, lambda model, rho: sam(model, rho, descent=nn.MSELoss()), data, [data])


def test_a_model_that_cannot_be_copied_is_refused():
    model = mlp()
    model.kept = model[0].weight * 2
    with pytest.raises(TypeError, match=r"the model cannot be copied.* copy\.deepcopy"):
        sweep(model)


# Documentation and warnings.


def snippets():
    text = (ROOT / "docs/choosing-rho.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("code", snippets())
def test_the_snippets_of_the_documentation_page_run(code):
    names = {"torch": torch, "bisam": bisam, "model": mlp(), "make_model": mlp, "sam": sam}
    data = {"train_loader": loader(), "validation_loader": [batch(2)]}
    exec(code, {**names, **data, "make_optimizer": sam})


def test_validating_on_the_training_batches_warns():
    batches = [batch(0)]
    with pytest.warns(UserWarning, match="are the same: ρ is chosen by samples that were trained on"):
        bisam.find_rho(mlp, sam, batches, batches, rhos=(0, 0.1), steps=1, repeats=1)
