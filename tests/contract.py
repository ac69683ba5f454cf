"""What every variant promises, on every base optimizer.

`variant` and `device` run over all there are, a `pair` of variant and base optimizer over those of `family.pairs`. No
variant is named here: what a promise depends on is read from the parts of the optimizer.
"""

import copy
import io
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bisam.engine.combined import leaves

from family import (
    BASES,
    KINDS,
    VARIANTS,
    ConvNet,
    assert_close,
    assert_identical,
    batch,
    begins_at_the_weights,
    build,
    closure_of,
    mlp,
    over_closure_pairs,
    over_hand_pairs,
    over_pairs,
    plain_step,
    takes_closures,
    tensors,
    weights_of,
)


class BrokenError(Exception):
    pass


class Contract:
    # ρ = 0

    @over_pairs
    def test_rho_zero_is_exactly_the_base_optimizer(self, pair, device):
        model, optimizer = build(*pair, rho=0.0, net=lambda: ConvNet(dropout=0.5), device=device)
        torch.manual_seed(0)
        alone = ConvNet(dropout=0.5).to(device)
        plain = BASES[pair[1]](alone.parameters())
        for seed in range(4):
            x, y = batch(seed, device=device)
            torch.manual_seed(seed)  # the same dropout masks: so ρ = 0 must not run a second pass
            loss = optimizer.minimize(x, y)
            torch.manual_seed(seed)
            with torch.no_grad():
                expected = nn.functional.cross_entropy(copy.deepcopy(alone)(x), y)
            torch.manual_seed(seed)
            plain_step(alone, plain, x, y)
            assert torch.equal(loss, expected)
        assert_identical(tensors(model, optimizer), tensors(alone, plain))

    @over_hand_pairs
    def test_rho_zero_by_hand_is_exactly_the_base_optimizer(self, pair, device):
        model, optimizer = build(*pair, rho=0.0, device=device)
        alone, plain = build(*pair, device=device)
        for seed in range(3):
            x, y = batch(seed, device=device)
            optimizer.criterion(model(x), y).backward()
            optimizer.ascend()
            optimizer.criterion(model(x), y).backward()
            optimizer.descend()
            plain_step(alone, plain.base, x, y)
        assert_identical(tensors(model, optimizer), tensors(alone, plain))

    # The weights are restored

    @over_pairs
    def test_the_update_starts_from_the_weights_bitwise_and_in_place(self, pair, device):
        model, optimizer = build(*pair, device=device)
        with torch.no_grad():
            scales = torch.logspace(-30, 4, model.head.weight.numel(), device=device)
            model.head.weight.mul_(scales.view_as(model.head.weight))
        storages = [p.data_ptr() for p in model.parameters()]
        seen = {}
        optimizer.base.register_step_pre_hook(lambda *_: seen.update(update=weights_of(model)))
        model.register_forward_pre_hook(lambda *_: seen.update({optimizer.phase: weights_of(model)}))
        for seed in range(2):
            before = weights_of(model)
            optimizer.minimize(*batch(seed, device=device))
            assert_identical(seen["update"], before)
            if optimizer.perturbation.needs_ascent and begins_at_the_weights(optimizer):
                assert_identical(seen.get("plain", seen["ascent"]), before)
            if optimizer.perturbation.needs_ascent or seed > 0:  # else there is no momentum to perturb by yet
                assert any(not torch.equal(a, b) for a, b in zip(seen["descent"], before, strict=True))
        assert [p.data_ptr() for p in model.parameters()] == storages

    @pytest.mark.parametrize("failing", ["ascent", "descent"])
    @pytest.mark.parametrize("when", ["forward", "backward"])
    @over_pairs
    def test_weights_and_state_are_restored_bitwise_when_a_pass_raises(self, pair, failing, when):
        model, optimizer = build(*pair)
        if failing == "ascent" and not optimizer.perturbation.needs_ascent:
            pytest.skip("the variant has no ascent pass")
        twin, twin_optimizer = build(*pair)
        x, y = batch()
        for m, o in ((model, optimizer), (twin, twin_optimizer)):
            o.minimize(x, y)
            o.minimize(x, y)  # two, so that the variants with a period of two perturb in the next
            m.norm.eval()  # its statistics are the model's: a pass at w may keep them
        before = tensors(model, optimizer)
        armed = [True]

        def break_once(*_):
            if optimizer.phase == failing and armed and torch.is_grad_enabled() == (when == "forward"):
                armed.clear()
                raise BrokenError

        if when == "forward":
            model.head.register_forward_hook(break_once)
        else:
            model.head.weight.register_hook(lambda gradient: break_once())
            model.head.bias.register_hook(lambda gradient: break_once())
        with pytest.raises(BrokenError):
            optimizer.minimize(x, y)
        assert_identical(tensors(model, optimizer), before)
        assert not optimizer.perturbed
        assert optimizer.phase == "ascent"
        assert all(p.requires_grad for p in model.parameters())
        optimizer.minimize(x, y)
        if optimizer.perturbation.memory is None:  # else its memory keeps the failed pass: its draws, its mean
            twin_optimizer.minimize(x, y)
            assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))

    @pytest.mark.parametrize("missing", ["ascent", "descent"])
    @over_closure_pairs
    def test_a_parameter_with_a_gradient_in_one_pass_only_is_restored_and_updated_by_the_descent_alone(
        self, pair, missing
    ):
        model, optimizer = build(*pair, net=lambda: nn.ModuleList([mlp(), mlp()]))
        x, y = batch()
        before = [p.detach().clone() for p in model[1].parameters()]
        at_update = []
        optimizer.base.register_step_pre_hook(
            lambda *_: at_update.extend(p.detach().clone() for p in model[1].parameters())
        )

        def closure():
            logits = model[0](x) if optimizer.phase in (missing, "plain") else model[0](x) + model[1](x)
            optimizer.criterion(logits, y).backward()

        optimizer.step(closure)
        assert_identical(at_update, before)
        updated = any(not torch.equal(a, b) for a, b in zip(before, model[1].parameters(), strict=True))
        assert updated == (missing == "ascent")

    @pytest.mark.parametrize("failing", ["ascent", "descent"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_weights_are_restored_bitwise_when_a_gradient_is_not_finite(self, closure_variant, failing, value):
        model, optimizer = build(closure_variant)
        x, y = batch()
        before = [p.detach().clone() for p in model.parameters()]
        at_update = []
        optimizer.base.register_step_pre_hook(
            lambda *_: at_update.extend(p.detach().clone() for p in model.parameters())
        )
        closure = closure_of(model, optimizer, x, y)

        def poisoned():
            loss = closure()
            if optimizer.phase == failing:
                model.conv.weight.grad[0] = value
            return loss

        optimizer.step(poisoned)
        assert_identical(at_update, before)

    def test_a_zero_gradient_does_not_perturb_the_weights(self, hand_variant):
        model, optimizer = build(hand_variant)
        optimizer.criterion.record(torch.zeros(2, 2), torch.tensor([0, 1]), torch.tensor(0.0))
        (sum(p.sum() for p in model.parameters()) * 0).backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.ascend()
        assert_identical([p.detach() for p in model.parameters()], before)
        optimizer.restore()

    # Buffers

    def test_buffers_are_updated_by_the_first_pass_only(self, variant, device):
        model, optimizer = build(variant, device=device)
        x, y = batch(device=device)
        once = copy.deepcopy(model)
        parts = x.split(optimizer.micro_batch or len(x))
        for part in parts:
            once(part)
        optimizer.minimize(x, y)
        assert model.norm.num_batches_tracked == len(parts)
        if begins_at_the_weights(optimizer):
            assert_identical(list(model.buffers()), list(once.buffers()))

    # The three forms

    @over_closure_pairs
    def test_step_with_a_closure_and_minimize_take_the_same_steps(self, pair, device):
        results = []
        for form in ("step", "minimize"):
            model, optimizer = build(*pair, device=device)
            for seed in range(3):
                x, y = batch(seed, device=device)
                if form == "step":
                    optimizer.step(closure_of(model, optimizer, x, y))
                else:
                    optimizer.minimize(x, y)
            results.append(tensors(model, optimizer))
        assert_identical(*results)

    @over_hand_pairs
    def test_the_two_passes_by_hand_and_minimize_take_the_same_steps(self, pair, device):
        model, optimizer = build(*pair, device=device)
        twin, twin_optimizer = build(*pair, device=device)
        for seed in range(3):
            x, y = batch(seed, device=device)
            optimizer.criterion(model(x), y).backward()
            optimizer.ascend()
            optimizer.criterion(model(x), y).backward()
            optimizer.descend()
            twin_optimizer.minimize(x, y)
        assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))

    def test_a_step_returns_cross_entropy_at_the_weights(self, variant):
        model, optimizer = build(variant, net=mlp)
        x, y = batch()
        with torch.no_grad():
            each = nn.functional.cross_entropy(model(x), y, reduction="none")
        loss = optimizer.minimize(x, y)
        if optimizer.plan.chooses and not optimizer.plan.needs_scores_of_ascent:  # for both passes: the half it chose
            each = each.topk(8).values
        if begins_at_the_weights(optimizer):
            torch.testing.assert_close(loss, each.mean())
        assert not loss.requires_grad

    # Cost

    @over_pairs
    def test_a_step_waits_for_the_device_no_more_than_its_base_optimizer(self, pair):
        _, optimizer = build(*pair, clip_norm=1.0)
        alone, plain = build(*pair)
        x, y = batch()
        with HostReads() as ours:
            optimizer.minimize(x, y)
        with HostReads() as theirs:
            plain_step(alone, plain.base, x, y)
        assert ours.count == theirs.count

    def test_a_step_adds_one_copy_of_the_weights_and_allocates_it_once(self, plain_variant):
        model, optimizer = build(
            plain_variant, net=lambda: nn.Sequential(nn.Linear(6, 2000), nn.Tanh(), nn.Linear(2000, 4))
        )
        x, y = batch()
        optimizer.minimize(x, y)
        weights = sum(p.nbytes for p in model.parameters())
        kept = sum(copy.nbytes for copy in optimizer._weights.copies)
        assert kept == weights
        optimizer.zero_grad()
        optimizer.criterion(model(x), y).backward()
        with Allocations() as allocations:
            optimizer.ascend()
        assert allocations.bytes < weights / 100  # norms and the like
        with Allocations() as allocations:
            optimizer.restore()
        assert allocations.bytes == 0

    def test_the_gradients_of_the_ascent_are_freed_before_the_descent(self, closure_variant):
        model, optimizer = build(closure_variant)
        held, alive = [], []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(
                lambda param: held.append(weakref.ref(param.grad)) if optimizer.phase == "ascent" else None
            )

        def look(*_):
            if optimizer.phase == "descent":
                alive.extend(ref for ref in held if ref() is not None)

        model.register_forward_pre_hook(look)
        x, y = batch()
        optimizer.step(closure_of(model, optimizer, x, y))
        assert bool(held) == optimizer.perturbation.needs_ascent
        assert not alive

    # Checkpoints

    @over_pairs
    def test_the_state_dict_is_that_of_the_base_optimizer_and_the_memory_of_the_variant(self, pair):
        _, optimizer = build(*pair)
        optimizer.minimize(*batch())
        state = optimizer.state_dict()
        memories = [optimizer.perturbation.memory, optimizer.merge.memory]
        has_memory = memories != [None, None] or optimizer.skips_steps
        assert state.keys() == {"state", "param_groups", "sharpness"} - (set() if has_memory else {"sharpness"})
        assert state["state"].keys() == optimizer.base.state_dict()["state"].keys()
        plain = BASES[pair[1]](mlp().parameters()).state_dict()
        own = set(state["param_groups"][0]) - set(plain["param_groups"][0])
        assert own == set(optimizer.perturbation.defaults) >= {"rho"}

    @over_pairs
    def test_a_checkpoint_taken_between_any_two_steps_resumes_bitwise(self, pair):
        steps, files = 4, []
        model, optimizer = build(*pair)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for seed in range(steps):
            files.append(io.BytesIO())
            torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], files[-1])
            optimizer.minimize(*batch(seed))
            scheduler.step()
        for taken_after, file in enumerate(files):
            file.seek(0)
            resumed, resumed_optimizer = build(*pair)
            resumed_optimizer.minimize(*batch(99))  # so that its state differs before it loads
            resumed_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(resumed_optimizer, steps)
            weights, state, schedule = torch.load(file, weights_only=True)
            resumed.load_state_dict(weights)
            resumed_optimizer.load_state_dict(state)
            resumed_scheduler.load_state_dict(schedule)
            for seed in range(taken_after, steps):
                resumed_optimizer.minimize(*batch(seed))
                resumed_scheduler.step()
            assert_identical(tensors(resumed, resumed_optimizer), tensors(model, optimizer))

    @over_pairs
    def test_training_continues_from_a_checkpoint_of_the_base_optimizer(self, pair):
        model, optimizer = build(*pair)
        plain_step(model, optimizer.base, *batch())
        plain = BASES[pair[1]](model.parameters())
        plain.load_state_dict(
            {
                **optimizer.base.state_dict(),
                "param_groups": BASES[pair[1]](model.parameters()).state_dict()["param_groups"],
            }
        )
        optimizer.load_state_dict(plain.state_dict())
        assert optimizer.param_groups[0]["rho"] == optimizer.perturbation.defaults["rho"]
        optimizer.minimize(*batch())

    def test_a_deep_copy_trains_independently(self, variant):
        model, optimizer = build(variant)
        optimizer.minimize(*batch(0))
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        before = tensors(model, optimizer)
        twin_optimizer.minimize(*batch(1))
        assert_identical(tensors(model, optimizer), before)
        optimizer.minimize(*batch(1))
        assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))

    # Parameter groups and schedulers

    def test_a_group_with_rho_zero_is_excluded_from_the_perturbation_and_its_norm(self, hand_variant):
        def two_groups(rho_of_second):
            torch.manual_seed(0)
            model = mlp().double()
            base = torch.optim.SGD(
                [{"params": model[0].parameters()}, {"params": model[2].parameters(), "rho": rho_of_second}], lr=0.1
            )
            optimizer = VARIANTS[hand_variant](base, model)
            x, y = batch(dtype=torch.float64)
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.criterion(model(x), y).backward()
            optimizer.ascend()
            return [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)], optimizer

        epsilon, optimizer = two_groups(0.0)
        assert all((e == 0).all() for e in epsilon[2:])
        full, _ = two_groups(optimizer.perturbation.defaults["rho"])
        # the same direction in the first group, longer by what the second took of the norm
        ratio = epsilon[0].norm() / full[0].norm()
        assert ratio > 1
        assert_close(epsilon[:2], [e * ratio for e in full[:2]], 1e-12)

    @over_pairs
    def test_an_added_group_is_perturbed_and_trained(self, pair):
        variant, base = pair
        torch.manual_seed(0)
        model = mlp()
        optimizer = VARIANTS[variant](BASES[base](model[0].parameters()), model)
        weight, bias = model[2].parameters()
        several = leaves(optimizer.base)  # of which each takes groups of its own
        (several[0] if len(several) > 1 else optimizer).add_param_group({"params": [weight]})
        (several[1] if len(several) > 1 else optimizer).add_param_group({"params": [bias]})
        whole, whole_optimizer = build(*pair, net=mlp)
        for seed in range(3):
            optimizer.minimize(*batch(seed))
            whole_optimizer.minimize(*batch(seed))
        assert_close(list(model.parameters()), list(whole.parameters()), 1e-6)

    @pytest.mark.parametrize("built_on", ["the optimizer", "its base"])
    def test_a_scheduler_on_the_optimizer_or_on_its_base_drives_both(self, variant, built_on):
        _, optimizer = build(variant)
        target = optimizer if built_on == "the optimizer" else optimizer.base
        scheduler = torch.optim.lr_scheduler.OneCycleLR(target, max_lr=0.2, total_steps=10)
        rates = []
        for seed in range(5):
            optimizer.minimize(*batch(seed))
            scheduler.step()  # would warn, and so fail, if the optimizer had not been seen to step
            rates.append((optimizer.param_groups[0]["lr"], optimizer.base.param_groups[0]["lr"]))
        assert all(a == b for a, b in rates)
        assert len(set(rates)) == 5

    def test_a_scheduler_on_the_optimizer_counts_steps_taken_by_hand(self, hand_variant):
        model, optimizer = build(hand_variant)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        x, y = batch()
        optimizer.criterion(model(x), y).backward()
        optimizer.ascend()
        optimizer.criterion(model(x), y).backward()
        optimizer.descend()
        scheduler.step()
        assert optimizer.base.param_groups[0]["lr"] == pytest.approx(0.01)

    # Accumulation and clipping

    @over_pairs
    def test_accumulated_parts_add_up_to_the_batch(self, pair):
        self._check_parts(pair, lambda model, optimizer, x, y: optimizer.minimize(x, y, accumulate=4))

    @over_closure_pairs
    def test_a_list_of_closures_adds_up_to_the_batch(self, pair):
        def step(model, optimizer, x, y):
            return optimizer.step(
                [closure_of(model, optimizer, *part) for part in zip(x.chunk(4), y.chunk(4), strict=True)]
            )

        self._check_parts(pair, step)

    @staticmethod
    def _check_parts(pair, step):
        model, optimizer = build(*pair, net=mlp, dtype=torch.float64)
        whole, whole_optimizer = build(*pair, net=mlp, dtype=torch.float64)
        for seed in range(3):
            x, y = batch(seed, dtype=torch.float64)
            loss, expected = step(model, optimizer, x, y), whole_optimizer.minimize(x, y)
            assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
            torch.testing.assert_close(optimizer.telemetry.as_dict(), whole_optimizer.telemetry.as_dict())
        # 1e-9: RMSprop divides by the root of squares, which makes more of a difference in the last digit
        assert_close(tensors(model, optimizer), tensors(whole, whole_optimizer), 1e-9)

    def test_clipping_applies_to_the_gradient_that_reaches_the_base_optimizer(self, variant):
        model, optimizer = build(variant, net=mlp, clip_norm=1e-3)
        free, free_optimizer = build(variant, net=mlp)
        seen = []
        optimizer.base.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
        free_optimizer.base.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in free.parameters()))
        optimizer.minimize(*batch())
        free_optimizer.minimize(*batch())
        clipped, unclipped = seen[:4], seen[4:]
        norm = torch.stack([g.norm() for g in unclipped]).norm()
        assert norm > 1e-3
        torch.testing.assert_close(optimizer.telemetry.descent_norm, norm)
        assert_close(clipped, [g * 1e-3 / (norm + 1e-6) for g in unclipped], 1e-7)

    # Random numbers

    @pytest.mark.parametrize("same", [False, True])
    def test_dropout_masks_differ_between_passes_unless_same_dropout_is_set(self, plain_variant, device, same):
        net = lambda: nn.Sequential(nn.Dropout(0.5), mlp())  # noqa: E731
        model, optimizer = build(plain_variant, net=net, device=device, same_dropout=same)
        masks = []
        model[0].register_forward_hook(lambda _, inputs, output: masks.append(output == 0))
        for _ in range(2):
            optimizer.minimize(*batch(device=device))
        up, down, next_up, next_down = masks
        assert torch.equal(up, down) == torch.equal(next_up, next_down) == same
        assert not torch.equal(up, next_up)  # the next step draws others in any case

    # torch.compile and CUDA

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", KINDS)  # the model is compiled, not the objective
    def test_a_compiled_model_takes_the_same_steps(self, kind):
        model, optimizer = build(kind)
        torch.manual_seed(0)
        compiled = torch.compile(ConvNet(), backend="aot_eager")  # inductor needs a compiler on the machine
        compiled_optimizer = VARIANTS[kind](BASES["SGD(foreach)"](compiled.parameters()), compiled)
        for seed in range(3):
            optimizer.minimize(*batch(seed))
            compiled_optimizer.minimize(*batch(seed))
        assert_close(tensors(compiled, compiled_optimizer), tensors(model, optimizer), 1e-5)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    def test_a_step_on_cuda_never_synchronises(self, variant):
        model, optimizer = build(variant, device="cuda", clip_norm=1.0)
        x, y = batch(device="cuda")
        optimizer.minimize(x, y)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.minimize(x, y)
            if takes_closures(optimizer):
                optimizer.step(closure_of(model, optimizer, x, y))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_a_step_captured_in_a_cuda_graph_replays_as_the_eager_step(self, plain_variant):
        eager, eager_optimizer = build(plain_variant, device="cuda")
        model, optimizer = build(plain_variant, device="cuda")
        x, y = batch(device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                optimizer.minimize(x, y)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.minimize(x, y)
        for seed in range(1, 4):
            fresh = batch(seed, device="cuda")
            x.copy_(fresh[0])
            y.copy_(fresh[1])
            graph.replay()
        for seed in [0, 0, 0, 1, 2, 3]:
            eager_optimizer.minimize(*batch(seed, device="cuda"))
        assert_close(list(model.parameters()), list(eager.parameters()), 1e-5)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_peak_memory_on_cuda_is_that_of_the_base_optimizer_and_one_copy_of_the_weights(self, plain_variant):
        def peak(step):
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            step()
            return torch.cuda.max_memory_allocated() - start

        def net():
            return nn.Sequential(nn.Linear(6, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 4))

        x, y = batch(device="cuda")
        model, optimizer = build(plain_variant, net=net, device="cuda")
        weights = sum(p.nbytes for p in model.parameters())
        plain_step(model, optimizer.base, x, y)  # the base optimizer's state and the library's workspaces exist now
        optimizer.zero_grad()
        base_peak = peak(lambda: plain_step(model, optimizer.base, x, y))
        optimizer.zero_grad()
        assert peak(lambda: optimizer.minimize(x, y)) <= base_peak + weights * 1.02


class HostReads(TorchDispatchMode):
    """Counts how often a tensor's value is read by Python, which on a device means waiting for it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class Allocations(TorchDispatchMode):
    """Adds up the memory of what operations return, other than what they were given."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {t.data_ptr() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.data_ptr() not in given:
                self.bytes += t.nbytes
        return result
