"""A captured step is the eager step: the same numbers, with one launch. What cannot be captured runs eagerly."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import bisam
from bisam.capture import capture, capture_together
from bisam.capture.recording import Branch
from bisam.capture.steps import MOST_GRAPHS, WARMUP_OF_RANKS, AlikeOnAllRanks
from bisam.perturbation import Ball, RandomTensors
from bisam.tensors.buckets import into_buckets

from family import BASES, CLASSES, FEATURES, VARIANTS, ConvNet, batch, build, kind_of, mlp

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def deterministic():
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def twins(variant="BiSAM(log)", base="SGD(foreach)", **options):
    """Two equal trainings. The base of the first, which is not captured, gets the form that capturing gives a base."""
    eager, eager_optimizer = build(variant, base, device="cuda", **options)
    model, optimizer = build(variant, base, device="cuda", **options)
    for group in eager_optimizer.param_groups:
        group.update({"fused": True, "foreach": False} if "fused" in group else {})
        group.update({"capturable": True} if "capturable" in group else {})
    return eager, eager_optimizer, model, optimizer


def tensors_of(model, optimizer):
    """Parameters, buffers and the optimizer's state."""
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *state]


def assert_same(one, other, tolerance=0.0):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# On a CPU, and wherever no graph is possible: the eager step.


def test_without_cuda_capture_warns_and_runs_the_eager_step():
    model, optimizer = build()
    twin, twin_optimizer = build()
    with pytest.warns(UserWarning, match=r"parameters on a CUDA device, and these are on cpu.*runs eagerly"):
        step = capture(optimizer)
    assert "cpu" in step.eager_because
    for seed in range(4):
        assert torch.equal(step(*batch(seed)), twin_optimizer.minimize(*batch(seed)))
    assert_same(tensors_of(model, optimizer), tensors_of(twin, twin_optimizer))
    assert optimizer.telemetry.flips is not None


def changed_buffer(model):
    model.norm.running_mean = model.norm.running_mean.clone()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.norm.eval(),
        changed_buffer,
        lambda model: next(model.parameters()).requires_grad_(False),
        lambda model: setattr(model, "norm", copy.deepcopy(model.norm)),
        lambda model: setattr(model, "dropout", nn.Dropout(0.5)),
        lambda model: setattr(model.norm, "weight", nn.Parameter(model.norm.weight.detach().clone())),
    ],
    ids=[
        "a module in evaluation",
        "another buffer",
        "a frozen parameter",
        "another norm",
        "another dropout",
        "a parameter that the optimizer does not have",
    ],
)
def test_a_change_of_the_model_changes_the_signature_of_its_graph(change):
    model, optimizer = build(net=ConvNet)
    branch = Branch(optimizer, None, None, None)
    before = branch.signature(batch())
    assert branch.signature(batch()) == before
    change(model)
    assert branch.signature(batch()) != before


def test_each_kind_of_step_has_a_signature_of_its_own():
    """Of LookSAM: perturbed, between two perturbed ones, and the base optimizer's, which clears the memory."""
    _, optimizer = build("LookSAM", every=3, start=lambda step: step < 2 or step == 4)
    branch, signatures, in_memory = Branch(optimizer, None, None, None), [], []
    for seed in range(6):
        branch.refresh()
        signatures.append(branch.signature(batch(seed)))
        tables = optimizer.merge.memory.tensors.get("orthogonal", {})
        in_memory.append(any(bool(tensor.any()) for tensor in tables.values()))
        branch.run(batch(seed))
    perturbed, between, plain, *_ = kinds = [signature[1].name for signature in signatures]
    assert kinds == ["PERTURBED", "BETWEEN", "PLAIN", "PLAIN", "BETWEEN", "PLAIN"]
    assert len({perturbed, between, plain}) == 3
    assert in_memory == [False, True, False, False, False, False]


@needs_cuda
def test_captured_steps_with_a_start_function_are_those_of_eager_training():
    options = {"every": 3, "start": lambda step: step % 9 < 6}
    eager, eager_optimizer, model, optimizer = twins("LookSAM", **options)
    step = capture(optimizer)
    for seed in range(40):
        eager_optimizer.minimize(*batch(seed, device="cuda"))
        step(*batch(seed, device="cuda"))
    assert len(step._steps._graphs) == 3
    assert_same(tensors_of(model, optimizer), tensors_of(eager, eager_optimizer), 1e-5)


def test_replay_lists_each_module_of_the_model_once():
    model, optimizer = build(net=ConvNet)
    model.again = model.norm  # a module in two places
    assert sorted(map(id, Branch(optimizer, None, None, None).replay.modules())) == sorted(map(id, model.modules()))


@pytest.mark.filterwarnings("ignore:a CUDA graph needs")
def test_without_cuda_a_closure_may_run_the_passes_too():
    model, optimizer = build()
    twin, twin_optimizer = build()

    def closure(x, y):
        optimizer.zero_grad()
        loss = optimizer.criterion(model(x), y)
        loss.backward()
        return loss

    step = capture(optimizer, closure)
    for seed in range(3):
        assert torch.equal(step(*batch(seed)), twin_optimizer.minimize(*batch(seed)))
    assert_same(model.parameters(), twin.parameters())


@pytest.mark.filterwarnings("ignore:a CUDA graph needs")
def test_without_cuda_several_trainings_together_equal_each_one_alone():
    names = ["SAM", "BiSAM(log)", "ABiSAM(tanh)"]
    together, alone = [build(name) for name in names], [build(name) for name in names]
    step = capture_together([optimizer for _, optimizer in together])
    for seed in range(3):
        losses = step([batch(seed + i) for i in range(3)])
        assert losses == [optimizer.minimize(*batch(seed + i)) for i, (_, optimizer) in enumerate(alone)]
    for (model, _), (twin, _) in zip(together, alone, strict=True):
        assert_same(model.parameters(), twin.parameters())


@pytest.mark.filterwarnings("ignore:a CUDA graph needs")
def test_random_numbers_of_a_given_generator_are_unaffected_by_other_draws(device):
    def train(disturb):
        model, optimizer = build(net=lambda: ConvNet(dropout=0.5), device=device)
        step = capture(optimizer, generator=torch.Generator(device).manual_seed(7))
        for seed in range(6):
            step(*batch(seed, device=device))
            if disturb:
                torch.rand(3, device=device)
        return [p.detach().clone() for p in model.parameters()]

    assert_same(train(disturb=True), train(disturb=False))


@pytest.mark.filterwarnings("ignore:a CUDA graph needs")
def test_with_a_generator_every_step_has_another_dropout_mask():
    model, optimizer = build("SAM", net=lambda: nn.Sequential(nn.Dropout(0.5), mlp()), rho=0.0)
    step = capture(optimizer, generator=torch.Generator().manual_seed(7))
    masks = []
    model[0].register_forward_hook(lambda _, __, output: masks.append(output == 0))
    for _ in range(2):
        step(*batch())
    assert not torch.equal(*masks)


@pytest.mark.filterwarnings("ignore:a CUDA graph needs")
def test_the_generator_of_a_training_resumes_from_a_checkpoint(device):
    model, optimizer = build(net=lambda: ConvNet(dropout=0.5), device=device)
    generator = torch.Generator(device).manual_seed(7)
    step = capture(optimizer, generator=generator)
    for seed in range(5):
        step(*batch(seed, device=device))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict())), generator.get_state()
    losses = [step(*batch(seed, device=device)) for seed in range(5)]
    model.load_state_dict(saved[0][0])
    optimizer.load_state_dict(saved[0][1])
    generator.set_state(saved[1])
    assert losses == [step(*batch(seed, device=device)) for seed in range(5)]


@pytest.mark.filterwarnings("ignore:a CUDA graph needs")
def test_the_function_after_may_sum_up_telemetry_within_the_step(device):
    _, optimizer = build(device=device)
    total, flips = torch.zeros((), device=device), torch.zeros((), dtype=torch.long, device=device)

    def add(each):
        total.add_(each.telemetry.loss)
        flips.add_(each.telemetry.flips)

    step = capture(optimizer, after=add)
    expected, expected_flips = 0.0, 0
    for seed in range(8):
        expected += step(*batch(seed, device=device)).item()
        expected_flips += optimizer.telemetry.flips.item()
    assert total.item() == pytest.approx(expected, rel=1e-6)
    assert flips.item() == expected_flips


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: capture(torch.optim.SGD(mlp().parameters(), lr=0.1)), TypeError, "sharpness-aware optimizer"),
        (lambda: capture(bisam.SAM(torch.optim.SGD(mlp().parameters(), lr=0.1))), ValueError, r"SAM\(base, model\)"),
        (lambda: capture_together([]), ValueError, "list of optimizers is empty"),
        (
            lambda: capture_together([build()[1]], generators=[]),
            ValueError,
            "1 optimizers need as many.* got 0",
        ),
        (lambda: capture(build()[1], warmup=0), ValueError, "warmup must be at least 1.* got 0"),
    ],
)
def test_invalid_arguments_are_explained(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.filterwarnings("ignore:a CUDA graph needs")
def test_capture_together_needs_one_batch_for_each_training():
    step = capture_together([build()[1], build()[1]])
    with pytest.raises(ValueError, match="2 trainings need as many batches, got 1"):
        step([batch()])


@needs_cuda
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"same_dropout": True}, "same_dropout"),
        ({"scaler": lambda: torch.amp.GradScaler("cuda")}, "GradScaler decides on the host.*bfloat16"),
    ],
)
def test_options_that_a_graph_cannot_hold_run_eagerly_with_a_warning(options, reason):
    def made():
        return {name: value() if callable(value) else value for name, value in options.items()}

    model, optimizer = build(device="cuda", **made())
    twin, twin_optimizer = build(device="cuda", **made())
    with pytest.warns(UserWarning, match=reason):
        step = capture(optimizer)
    for seed in range(5):
        step(*batch(seed, device="cuda"))
        twin_optimizer.minimize(*batch(seed, device="cuda"))
    assert_same(model.parameters(), twin.parameters(), 1e-6)


# On CUDA: the graph.


@needs_cuda
def test_a_captured_step_is_the_eager_step_of_every_variant(variant_alike_when_captured):
    eager, eager_optimizer, model, optimizer = twins(variant_alike_when_captured, clip_norm=5.0)
    step = capture(optimizer)
    for seed in range(10):
        for either in (eager_optimizer, optimizer):
            either.param_groups[0].update(lr=0.1 / (1 + seed), rho=0.05 * (1 + seed))
        expected = eager_optimizer.minimize(*batch(seed, device="cuda"))
        torch.testing.assert_close(step(*batch(seed, device="cuda")), expected, rtol=1e-5, atol=1e-6)
    assert step._steps._graphs
    assert_same(tensors_of(model, optimizer), tensors_of(eager, eager_optimizer), 1e-5)
    reported, expected = optimizer.telemetry.as_dict(), eager_optimizer.telemetry.as_dict()
    assert reported.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(reported[name], value, rtol=1e-4, atol=1e-5, msg=name)


@needs_cuda
@pytest.mark.parametrize("name", ["SAM", "BiSAM(log)", "LookSAM", "MSAM"])
def test_plain_steps_before_start_and_perturbed_steps_have_a_graph_each(name):
    options = {"start": 7} if name == "LookSAM" else {"start": 7, "every": 1}
    eager, eager_optimizer, model, optimizer = twins(name, **options)
    step, graphs = capture(optimizer), []
    for seed in range(16):
        expected = eager_optimizer.minimize(*batch(seed, device="cuda"))
        torch.testing.assert_close(step(*batch(seed, device="cuda")), expected, rtol=1e-5, atol=1e-6)
        assert (optimizer.telemetry.perturbed_loss is None) == (eager_optimizer.telemetry.perturbed_loss is None)
        graphs.append(len(step._steps._graphs))
    assert graphs[6] == 1
    assert graphs[-1] >= 2
    assert_same(tensors_of(model, optimizer), tensors_of(eager, eager_optimizer), 1e-5)


@needs_cuda
@pytest.mark.parametrize("name", ["SAM", "LookSAM"])
def test_steps_after_stop_have_a_graph_of_their_own(name):
    eager, eager_optimizer, model, optimizer = twins(name, stop=12)
    step = capture(optimizer)
    for seed in range(20):
        expected = eager_optimizer.minimize(*batch(seed, device="cuda"))
        torch.testing.assert_close(step(*batch(seed, device="cuda")), expected, rtol=1e-5, atol=1e-6)
    assert len(step._steps._graphs) >= 2
    assert_same(tensors_of(model, optimizer), tensors_of(eager, eager_optimizer), 1e-5)


@needs_cuda
def test_a_captured_step_of_esam_with_an_adaptive_ball_equals_the_uncaptured_one():
    """The gradients are computed before they are scaled by 1/β: that factor has to be on the device."""
    models = []
    for run in (lambda o: capture(o), lambda o: lambda *batch: Branch(o, None, None, None).like_captured(batch)):
        torch.manual_seed(0)
        model = deep().to("cuda")
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        step = run(bisam.SharpnessAware(base, model, perturbation=RandomTensors(Ball(0.5, adaptive=True), 0.5)))
        for seed in range(6):
            step(*batch(seed, device="cuda"))
        models.append(model)
    assert_same(*(model.parameters() for model in models), 1e-5)


@needs_cuda
@pytest.mark.parametrize("efficient", ["ESAM", "EBiSAM(log)", "EBiSAM(tanh)"])
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_captured_step_of_esam_chooses_as_an_uncaptured_one_of_the_same_training(efficient, ran_before):
    """`minimize` is no comparison: it draws on the host, and other numbers."""
    _, twin_optimizer, model, optimizer = twins(efficient, net=deep)
    twin = twin_optimizer.model
    if ran_before:
        for either in (optimizer, twin_optimizer):
            either.minimize(*batch(99, device="cuda"))
    step, training = capture(optimizer), Branch(twin_optimizer, None, None, None)
    for seed in range(10):
        for either in (twin_optimizer, optimizer):
            either.param_groups[0].update(lr=0.1 / (1 + seed), rho=0.05 * (1 + seed))
        expected = training.like_captured(batch(seed, device="cuda"))
        torch.testing.assert_close(step(*batch(seed, device="cuda")), expected, rtol=1e-5, atol=1e-6)
    assert step._steps._graphs
    assert_same(tensors_of(model, optimizer), tensors_of(twin, twin_optimizer), 1e-5)


def deep():
    return nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(20)], mlp())


@pytest.mark.parametrize("beta", [0.05, 0.5])
def test_a_step_for_capture_perturbs_the_tensors_that_it_chose_by_rho_over_beta(beta, device):
    model, optimizer = build("ESAM", net=deep, rho=0.3, beta=beta, dtype=torch.float64, device=device)
    training, moves = Branch(optimizer, None, None, None), []
    x, y = batch(dtype=torch.float64, device=device)

    def record(*_):
        if optimizer.perturbed and optimizer.phase == "descent" and not torch.is_grad_enabled():
            moves.append([now - before for now, before in zip(model.parameters(), weights, strict=True)])

    optimizer.minimize(x, y)  # chooses on the host, and its choice must not affect the steps below
    model.register_forward_pre_hook(record)
    for _ in range(30):
        weights = [p.detach().clone() for p in model.parameters()]
        gradient = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
        training.like_captured((x, y))
        kept = [bool(move.any()) for move in moves[-1]]
        length = torch.cat([g.flatten() for g, keep in zip(gradient, kept, strict=True) if keep]).norm()
        for move, g, keep in zip(moves[-1], gradient, kept, strict=True):
            torch.testing.assert_close(move, 0.3 / beta * g / length if keep else torch.zeros_like(g))
    choices = [tuple(bool(move.any()) for move in step) for step in moves]
    assert len(set(choices)) > 10
    share = sum(map(sum, choices)) / sum(map(len, choices))
    assert abs(share - beta) < 0.1
    assert min(map(sum, choices)) >= 1


def test_gradients_of_tensors_that_a_captured_step_does_not_choose_may_be_infinite():
    params = [nn.Parameter(torch.ones(2)) for _ in range(40)]
    perturbation = RandomTensors(Ball(1.0), beta=0.5)
    for param in params:
        param.grad = torch.ones(2)
    perturbation.begin_step()
    choice = RandomTensors(Ball(1.0), beta=0.5)._choice(40, torch.device("cpu"))
    for param, keep in zip(params, choice, strict=True):
        param.grad.fill_(1.0 if keep else float("inf"))
    buckets = into_buckets([{"params": params, "rho": 1.0, "adaptive": False}], [1.0], [param.grad for param in params])
    perturbation.before_ascent(buckets, may_freeze=True, captured=True)
    norm = perturbation(buckets)
    torch.testing.assert_close(norm, (2.0 * choice.sum()).sqrt())
    for gradient, keep in zip(buckets[0].gradients, choice, strict=True):
        torch.testing.assert_close(gradient, torch.full((2,), 2 / norm.item() if keep else 0.0))


def test_the_choices_of_a_captured_training_resume_from_a_checkpoint():
    model, optimizer = build("ESAM", net=deep)
    twin, twin_optimizer = build("ESAM", net=deep)
    training = Branch(optimizer, None, None, None)
    for seed in range(3):
        training.like_captured(batch(seed))
    torch.manual_seed(123)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.load_state_dict(model.state_dict())
    resumed = Branch(twin_optimizer, None, None, None)
    for seed in range(3, 6):
        training.like_captured(batch(seed))
        resumed.like_captured(batch(seed))
    assert_same(tensors_of(model, optimizer), tensors_of(twin, twin_optimizer))


@needs_cuda
@pytest.mark.parametrize("net", [ConvNet, mlp])
def test_a_captured_step_is_the_eager_step_bit_for_bit_with_every_base(captured_base, net):
    eager, eager_optimizer, model, optimizer = twins(base=captured_base, net=net)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 12) for o in (eager_optimizer, optimizer)]
    step = capture(optimizer)
    for seed in range(12):
        # on the device: some optimizers round otherwise when they read it there
        rate = torch.tensor(eager_optimizer.param_groups[0]["lr"], device="cuda")
        eager_optimizer.param_groups[0]["lr"], number = rate, eager_optimizer.param_groups[0]["lr"]
        eager_optimizer.minimize(*batch(seed, device="cuda"))
        eager_optimizer.param_groups[0]["lr"] = number
        step(*batch(seed, device="cuda"))
        for schedule in schedules:
            schedule.step()
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert_same(tensors_of(model, optimizer), tensors_of(eager, eager_optimizer))


@needs_cuda
def test_every_call_is_one_step_also_the_one_that_captures():
    _, _, model, optimizer = twins()
    counts = []
    optimizer.register_step_post_hook(lambda *_: counts.append(model.norm.num_batches_tracked.item()))
    step = capture(optimizer)
    for seed in range(7):
        step(*batch(seed, device="cuda"))
    assert counts == [1, 2, 3, 4, 5, 6, 7]


@needs_cuda
def test_dropout_masks_differ_in_every_replay_and_are_those_of_eager_steps():
    _, eager_optimizer, _, optimizer = twins(net=lambda: ConvNet(dropout=0.5))
    step = capture(optimizer)
    for group in [*optimizer.param_groups, *eager_optimizer.param_groups]:
        group["lr"] = 0.0
    x, y = batch(device="cuda")
    torch.manual_seed(3)
    losses = [step(x, y).item() for _ in range(8)]
    assert len(set(losses)) == 8
    torch.manual_seed(3)
    assert losses == pytest.approx([eager_optimizer.minimize(x, y).item() for _ in range(8)], rel=1e-6)


@needs_cuda
def test_a_captured_step_under_bf16_autocast_is_the_eager_step():
    eager, eager_optimizer, model, optimizer = twins(autocast=torch.bfloat16)
    step = capture(optimizer)
    for seed in range(8):
        eager_optimizer.minimize(*batch(seed, device="cuda"))
        step(*batch(seed, device="cuda"))
    assert_same(model.parameters(), eager.parameters(), 1e-6)


@needs_cuda
def test_a_smaller_last_batch_has_a_graph_of_its_own():
    eager, eager_optimizer, model, optimizer = twins()
    step = capture(optimizer)
    for _ in range(3):
        for seed, size in enumerate([16, 16, 16, 5]):
            eager_optimizer.minimize(*batch(seed, size, device="cuda"))
            step(*batch(seed, size, device="cuda"))
            grads = [[p.grad for p in m.parameters()] for m in (model, eager)]
            assert_same(*grads, 1e-5)
    assert len(step._steps._graphs) == 2
    assert_same(tensors_of(model, optimizer), tensors_of(eager, eager_optimizer), 1e-6)


@needs_cuda
def test_more_shapes_than_the_limit_of_graphs_run_eagerly_with_a_warning():
    _, _, _, optimizer = twins(net=mlp)
    step = capture(optimizer, warmup=1)
    for size in range(4, 4 + MOST_GRAPHS):
        for _ in range(3):
            step(*batch(0, size, device="cuda"))
    step(*batch(0, 99, device="cuda"))
    with pytest.warns(UserWarning, match=f"{MOST_GRAPHS} graphs are captured already"):
        step(*batch(0, 99, device="cuda"))


@needs_cuda
def test_changes_of_modes_frozen_layers_and_options_take_effect_in_captured_steps():
    eager, eager_optimizer, model, optimizer = twins()
    step = capture(optimizer)

    def change(net, either, number):
        if number == 5:
            net.norm.eval()
        if number == 8:
            net.head.bias.requires_grad_(False)
        if number == 11:
            either.param_groups[0]["weight_decay"] = 0.1
        if number == 14:
            either.clip_norm = 0.01

    for number in range(18):
        for net, either in [(eager, eager_optimizer), (model, optimizer)]:
            change(net, either, number)
        eager_optimizer.minimize(*batch(number, device="cuda"))
        step(*batch(number, device="cuda"))
    assert_same(tensors_of(model, optimizer), tensors_of(eager, eager_optimizer), 1e-6)


@needs_cuda
@pytest.mark.parametrize("name", ["BiSAM(log)", "LookSAM", "FriendlySAM", "RSAM"])
def test_a_checkpoint_of_a_captured_training_resumes_bit_for_bit(name):
    _, _, model, optimizer = twins(name)
    step = capture(optimizer)
    for seed in range(6):
        step(*batch(seed, device="cuda"))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for seed in range(6, 12):
        step(*batch(seed, device="cuda"))

    _, _, again, again_optimizer = twins(name)
    again_step = capture(again_optimizer)
    for seed in range(5):  # which the checkpoint replaces
        again_step(*batch(seed + 50, device="cuda"))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved["model"])
    again_optimizer.load_state_dict(saved["optimizer"])
    for seed in range(6, 12):
        again_step(*batch(seed, device="cuda"))
    assert_same(tensors_of(model, optimizer), tensors_of(again, again_optimizer))


@needs_cuda
def test_losses_outlive_the_next_step_and_reading_stale_telemetry_is_refused():
    _, _, _, optimizer = twins()
    step = capture(optimizer)
    for seed in range(5):
        step(*batch(seed, device="cuda"))
    first = step(*batch(0, device="cuda"))
    reported, kept = optimizer.telemetry, optimizer.telemetry.loss
    assert torch.equal(first, kept)
    value = first.item()
    step(*batch(1, device="cuda"))
    assert first.item() == kept.item() == value
    with pytest.raises(RuntimeError, match="earlier captured step"):
        reported.flips  # noqa: B018
    assert optimizer.telemetry.flips is not None


@needs_cuda
def test_garbage_collection_of_graphs_does_not_break_a_capture():
    class Littering(ConvNet):
        def forward(self, x):
            if torch.cuda.is_current_stream_capturing():
                for _ in range(2000):  # enough of it for the collector to run
                    cycle = []
                    cycle.append(cycle)
            return super().forward(x)

    def train():
        _, optimizer = build(net=Littering, device="cuda")
        optimizer.myself = optimizer  # a cycle
        step = capture(optimizer)
        for seed in range(6):
            step(*batch(seed, device="cuda"))
        assert step._steps._graphs

    for _ in range(4):
        train()


@needs_cuda
def test_too_little_memory_for_a_capture_warns_and_runs_the_eager_step():
    def net():
        return nn.Sequential(
            nn.Linear(FEATURES, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, CLASSES)
        )

    _, _, model, optimizer = twins(net=net)
    twin, twin_optimizer, *_ = twins(net=net)
    step = capture(optimizer)
    for seed in range(3):
        step(*batch(seed, device="cuda"))
        twin_optimizer.minimize(*batch(seed, device="cuda"))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        with pytest.warns(UserWarning, match="not enough memory for a captured step"):  # noqa: PT031
            try:
                step(*batch(3, device="cuda"))
            except torch.cuda.OutOfMemoryError:  # the eager step may find none either
                torch.cuda.set_per_process_memory_fraction(1.0)
                step(*batch(3, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    twin_optimizer.minimize(*batch(3, device="cuda"))
    assert_same(model.parameters(), twin.parameters(), 1e-6)
    assert "memory" in step.eager_because


@needs_cuda
def test_a_model_with_parameters_of_another_optimizer_is_not_captured():
    """After its zero_grad() a graph would write gradients to memory that nothing reads."""
    torch.manual_seed(0)
    model = mlp().cuda()
    *body, weight, bias = model.parameters()
    optimizer = bisam.SAM(torch.optim.SGD(body, lr=0.1), model)
    with pytest.warns(UserWarning, match=r"freeze them by requires_grad_\(False\)"):
        step = capture(optimizer)
    step(*batch(device="cuda"))
    assert weight.grad is not None
    for param in (weight, bias):
        param.requires_grad_(False)
    assert capture(optimizer).eager_because is None


@needs_cuda
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the same
def test_a_captured_step_of_a_compiled_model_is_the_eager_step():
    eager, eager_optimizer, model, optimizer = twins(net=mlp)
    model.compile()
    step = capture(optimizer)
    for seed in range(7):
        eager_optimizer.minimize(*batch(seed, device="cuda"))
        step(*batch(seed, device="cuda"))
    assert step._steps._graphs
    assert_same(model.parameters(), eager.parameters(), 1e-5)


@needs_cuda
def test_trainings_in_one_graph_equal_each_one_alone_bit_for_bit():
    names = ["SAM", "BiSAM(log)", "ABiSAM(tanh)", "GSAM", "RSAM", "FriendlySAM"]

    def make(name):
        return build(name, net=lambda: ConvNet(dropout=0.3), device="cuda")

    def own_generators():
        return [torch.Generator("cuda").manual_seed(i) for i in range(len(names))]

    together, alone = [make(name) for name in names], [make(name) for name in names]
    step = capture_together([optimizer for _, optimizer in together], generators=own_generators())
    steps = [capture(o, generator=g) for (_, o), g in zip(alone, own_generators(), strict=True)]
    for number in range(10):
        batches = [batch(100 * number + i, device="cuda") for i in range(len(names))]
        for optimizer in [o for _, o in (*together, *alone)]:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        losses = step(batches)
        assert losses == [each(*own) for each, own in zip(steps, batches, strict=True)]
    assert len(step._graphs) == 1
    for one, other in zip(together, alone, strict=True):
        assert_same(tensors_of(*one), tensors_of(*other))


@needs_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the same
def test_a_training_continues_bit_for_bit_when_the_set_of_trainings_in_its_graph_changes(compiled):
    """As when one of several trainings ends, and another takes its place."""
    names = ["SAM", "BiSAM(log)", "BiSAM(tanh)", "SAM"]
    together, alone = [build(name, device="cuda") for name in names], [build(name, device="cuda") for name in names]
    for (model, _), (twin, _) in zip(together, alone, strict=True):
        if compiled:
            model.compile(dynamic=False)
            twin.compile(dynamic=False)
    steps = [capture(optimizer) for _, optimizer in alone]
    number = 0
    for members in ([0, 1, 2], [1, 2], [1, 2, 3], [3]):
        step = capture_together([together[i][1] for i in members])
        for _ in range(6):
            number += 1
            batches = [batch(100 * number + i, device="cuda") for i in members]
            losses = step(batches)
            assert losses == [steps[i](*own) for i, own in zip(members, batches, strict=True)]
        assert len(step._graphs) == 1
    for one, other in zip(together, alone, strict=True):
        assert_same(tensors_of(*one), tensors_of(*other))


@needs_cuda
def test_memory_of_a_captured_step_is_that_of_the_base_optimizer_and_one_copy_of_the_weights():
    def net():
        return nn.Sequential(
            nn.Linear(FEATURES, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, CLASSES)
        )

    def peak(variant):
        torch.cuda.empty_cache()
        start = torch.cuda.memory_allocated()
        model = net().cuda()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = variant(base, model)
        step = capture(optimizer)
        for seed in range(4):
            step(*batch(seed, device="cuda"))
        torch.cuda.reset_peak_memory_stats()
        step(*batch(9, device="cuda"))
        return torch.cuda.max_memory_allocated() - start, sum(p.nbytes for p in model.parameters())

    plain, _ = peak(lambda base, model: bisam.SAM(base, model, rho=0.0))
    perturbed, weights = peak(bisam.BiSAM)
    assert perturbed <= plain + weights * 1.02


def test_warnings_point_to_the_line_of_the_caller():
    _, optimizer = build()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        capture(optimizer)
    assert seen[0].filename == __file__


def test_uncaptured_steps_of_a_captured_training_are_the_eager_steps(variant):
    """The numbers that it reads from tensors are those of the eager step; here on a CPU, so without a graph."""
    model, optimizer = build(variant)
    twin, twin_optimizer = build(variant)
    twin_optimizer.param_groups[0].update(fused=True, foreach=False)
    training = Branch(optimizer, None, None, None)
    for seed in range(6):
        for either in (optimizer, twin_optimizer):
            either.param_groups[0].update(lr=0.1 / (1 + seed), rho=0.05 * (1 + seed))
        training.like_captured(batch(seed))
        twin_optimizer.minimize(*batch(seed))
        assert optimizer.param_groups[0]["lr"] == 0.1 / (1 + seed)
        assert not optimizer.param_groups[0]["fused"]
    # tensors that ESAM does not choose are 0 in the norm then, which may round it otherwise
    tolerance = 1e-6 if kind_of(variant) == "ESAM" else 0.0
    assert_same(tensors_of(model, optimizer), tensors_of(twin, twin_optimizer), tolerance)


def test_the_state_of_the_base_optimizer_gets_the_memory_layout_of_its_weight(device):
    """A file may have lost the layout: torch's fused update refuses any other on CUDA, and is wrong on a CPU."""

    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4, CLASSES))
        net.to(device=device, memory_format=torch.channels_last)
        return net, bisam.SAM(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)

    x, y = torch.randn(8, 3, 4, 4, device=device), torch.arange(8, device=device) % CLASSES
    (model, optimizer), (twin, twin_optimizer) = made(), made()
    for either in (optimizer, twin_optimizer):
        either.minimize(x, y)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].contiguous()
    training = Branch(optimizer, None, None, None)
    for _ in range(2):
        training.like_captured((x, y))
        twin_optimizer.minimize(x, y)
    for param, state in optimizer.state.items():
        assert state["momentum_buffer"].stride() == param.stride()
    assert_same(tensors_of(model, optimizer), tensors_of(twin, twin_optimizer), 1e-6)


# Several processes: one GPU holds one rank of NCCL, so the graph is tested with a group of one.


@pytest.fixture
def one_rank(tmp_path):
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    where = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("nccl", init_method=where, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def replica_of(model):
    """Built on a stream that can be captured: it keeps adding up gradients there."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wrapped = nn.parallel.DistributedDataParallel(model)
    torch.cuda.current_stream().wait_stream(side)
    return wrapped


@needs_cuda
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharpness", ["local", "global"])
def test_a_captured_step_under_data_parallel_records_its_collectives(sharpness):
    eager, eager_optimizer, model, _ = twins()
    wrapped = replica_of(model)
    optimizer = VARIANTS["BiSAM(log)"](BASES["SGD(foreach)"](wrapped.parameters()), wrapped, sharpness=sharpness)
    step = capture(optimizer)
    assert step.eager_because is None
    for seed in range(WARMUP_OF_RANKS + 4):
        loss = step(*batch(seed, device="cuda"))
        assert torch.equal(loss, eager_optimizer.minimize(*batch(seed, device="cuda")))
    assert len(step._steps._graphs) == 1
    assert_same([*model.parameters(), *model.buffers()], [*eager.parameters(), *eager.buffers()])
    with pytest.raises(RuntimeError, match="takes batches of one shape"):
        step(*(tensor[:2] for tensor in batch(0, device="cuda")))


def test_ranks_refuse_a_batch_of_another_shape_or_on_the_cpu():
    alike = AlikeOnAllRanks()
    alike.check((torch.zeros(4, 3), torch.zeros(4)), None)
    alike.check((torch.ones(4, 3), torch.ones(4)), None)
    with pytest.raises(RuntimeError, match=r"one shape.*the first was .*\(4, 3\).*got .*\(2, 3\).*drop_last=True"):
        alike.check((torch.zeros(2, 3), torch.zeros(2)), None)
    with pytest.raises(RuntimeError, match=r"a tensor of the batch is on cpu: with several processes"):
        alike.check((torch.zeros(4, 3), torch.zeros(4)), "a tensor of the batch is on cpu")
