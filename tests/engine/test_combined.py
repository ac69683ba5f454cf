"""Several base optimizers in one step: as if each stepped alone with the gradient at w + ε."""

import copy
import gc
import io
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import bisam
from bisam.engine.combined import Combined
from bisam.engine.replay import Replay

from family import ScheduleFree, assert_close, assert_identical, batch, mlp


def split(model):
    """The matrices of a model, and its other parameters."""
    params = [*model.parameters()]
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def two(model):
    matrices, others = split(model)
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=1e-2)]


def built(cls=bisam.SAM, **options):
    torch.manual_seed(0)
    model = mlp()
    return model, cls(two(model), model, **options)


def test_one_perturbation_moves_all_parameters_and_each_optimizer_steps_its_own():
    torch.manual_seed(0)
    model = mlp().double()
    alone = copy.deepcopy(model)
    optimizer = bisam.SAM(two(model), model, rho=0.3)
    first, second = two(alone)
    params = [*alone.parameters()]
    for seed in range(5):
        x, y = batch(seed)
        optimizer.minimize(x.double(), y)
        weights = [p.detach().clone() for p in params]
        gradient = torch.autograd.grad(nn.functional.cross_entropy(alone(x.double()), y), params)
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        with torch.no_grad():
            for p, g in zip(params, gradient, strict=True):
                p += 0.3 * g / norm
        for p, g in zip(
            params, torch.autograd.grad(nn.functional.cross_entropy(alone(x.double()), y), params), strict=True
        ):
            p.grad = g
        with torch.no_grad():
            for p, w in zip(params, weights, strict=True):
                p.copy_(w)
        first.step()
        second.step()
    assert_close([*model.parameters()], params, 1e-10)  # float64


def test_the_groups_of_one_optimizer_can_be_excluded_from_the_perturbation():
    model, optimizer = built(rho=0.5)
    optimizer.param_groups[1]["rho"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch()
    optimizer.zero_grad()
    optimizer.criterion(model(x), y).backward()
    optimizer.ascend()
    moved = [(p - b).norm().item() for p, b in zip(model.parameters(), before, strict=True)]
    assert [bool(length) for length in moved] == [p.dim() == 2 for p in model.parameters()]
    assert torch.tensor(moved).norm().item() == pytest.approx(0.5, rel=1e-5)


def test_momentum_sam_follows_the_momentum_of_each_optimizer():
    model, optimizer = built(bisam.MSAM)
    optimizer.minimize(*batch(0))
    before = [p.detach().clone() for p in model.parameters()]
    names = {2: "momentum_buffer", 1: "exp_avg"}  # SGD has the matrices, AdamW the others
    momenta = [optimizer.state[p][names[p.dim()]].clone() for p in model.parameters()]
    length = torch.cat([momentum.flatten() for momentum in momenta]).norm()
    seen = []
    model.register_forward_pre_hook(
        lambda *_: seen.extend(p.detach() - b for p, b in zip(model.parameters(), before, strict=True))
    )
    optimizer.minimize(*batch(1))
    expected = [-0.3 * momentum / length for momentum in momenta]  # the default rho
    assert_close(seen, expected, 1e-6)


def test_a_checkpoint_resumes_bitwise_and_has_the_form_of_one_optimizers_state():
    model, optimizer = built(bisam.LookSAM, every=2)
    for seed in range(3):
        optimizer.minimize(*batch(seed))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    numbers = [number for group in saved["optimizer"]["param_groups"] for number in group["params"]]
    assert numbers == [*range(len([*model.parameters()]))] == sorted(saved["optimizer"]["state"])
    other, resumed = built(bisam.LookSAM, every=2)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for seed in range(3, 6):
        optimizer.minimize(*batch(seed))
        resumed.minimize(*batch(seed))
    assert_identical([*other.parameters()], [*model.parameters()])


def test_a_checkpoint_by_names_of_parameters_resumes_bitwise():
    """As torch.distributed.checkpoint has it, for sharded models."""
    model, optimizer = built()
    optimizer.minimize(*batch(0))
    saved = get_optimizer_state_dict(model, optimizer.base)
    assert saved["state"].keys() == {name for name, _ in model.named_parameters()}
    other, resumed = built()
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed.base, copy.deepcopy(saved))  # its tensors are the state's own
    optimizer.minimize(*batch(1))
    resumed.minimize(*batch(1))
    assert_identical([*other.parameters()], [*model.parameters()])


def test_a_checkpoint_of_other_groups_is_refused():
    _, optimizer = built()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["params"] = saved["param_groups"][0]["params"][:1]
    with pytest.raises(ValueError, match=r"groups of 1 and 2 tensors, and .* of 2 and 2 tensors"):
        optimizer.load_state_dict(saved)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def stepped(*kinds):
    """Optimizers of these kinds, for the matrices and for the others, after one step."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = bisam.SAM([kind(params) for kind, params in zip(kinds, split(model), strict=True)], model)
    optimizer.minimize(*batch(0))
    return optimizer


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        ((sgd, adamw), (adamw, sgd)),  # the list in another order
        ((sgd, sgd), (sgd, adamw)),  # the first could load it, the second could not
        ((sgd, torch.optim.RMSprop), (adamw, torch.optim.RMSprop)),
        ((adamw, adamw), (torch.optim.NAdam, torch.optim.NAdam)),
    ],
)
@pytest.mark.parametrize("through", ["wrapper", "base"])
def test_a_checkpoint_of_other_kinds_of_optimizers_is_refused_and_changes_nothing(saved, loading, through):
    checkpoint = copy.deepcopy(stepped(*saved).state_dict())
    checkpoint["param_groups"][0]["lr"] = 7.0
    optimizer, alike = stepped(*loading), stepped(*loading)
    with pytest.raises(ValueError, match=r"of another kind of optimizer than (AdamW|SGD|NAdam).*as it was when"):
        (optimizer if through == "wrapper" else optimizer.base).load_state_dict(checkpoint)
    assert optimizer.param_groups[0]["lr"] == alike.param_groups[0]["lr"]
    for seed in (1, 2):
        optimizer.minimize(*batch(seed))
        alike.minimize(*batch(seed))
    assert_identical(optimizer._parameters(), alike._parameters())


def test_a_checkpoint_that_the_second_optimizer_refuses_leaves_the_first_unchanged():
    optimizer = stepped(sgd, adamw)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    checkpoint["param_groups"][0]["lr"] = 7.0

    def refuse(*_):
        raise RuntimeError("not this one")

    optimizer.base.optimizers[1].register_load_state_dict_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="not this one"):
        optimizer.load_state_dict(checkpoint)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_checkpoint_of_an_older_torch_loads():
    """It lacks options that were added later: torch fills them in."""
    optimizer = stepped(sgd, lambda params: torch.optim.AdamW(params, foreach=True, amsgrad=True))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    for group in checkpoint["param_groups"]:
        for name in ("foreach", "fused", "maximize", "differentiable", "capturable", "amsgrad", "nesterov"):
            group.pop(name, None)
        group.pop("decoupled_weight_decay", None)  # of AdamW, where its default is True
    optimizer.load_state_dict(checkpoint)
    optimizer.minimize(*batch(1))


def test_loading_a_checkpoint_into_one_of_the_optimizers_keeps_the_options_of_its_groups():
    model, optimizer = built()
    optimizer.param_groups[1]["rho"] = 0.0
    saved = two(model)[1].state_dict()  # of the base optimizer alone, without ρ
    optimizer.base.optimizers[1].load_state_dict(saved)
    optimizer.minimize(*batch())
    assert [group["rho"] for group in optimizer.param_groups] == [0.05, 0.0]


def test_hooks_of_one_optimizer_or_of_all_are_detected():
    for place in range(3):
        _, optimizer = built()
        replay = Replay(optimizer)
        assert not replay.base_has_hooks()
        [optimizer.base, *optimizer.base.optimizers][place].register_step_pre_hook(lambda *_: None)
        assert replay.base_has_hooks()


class Counting(torch.optim.SGD):
    """Keeps a number that belongs to no parameter in its state, and another beside the state."""

    seen = 0

    def step(self, closure=None):
        self.seen += 1
        self.state["updates"] = self.state.get("updates", 0) + 1
        super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.seen = state_dict["seen"]


def test_what_each_optimizer_saves_beside_the_state_of_parameters_is_restored():
    def counting(params):
        return Counting(params, lr=0.1, momentum=0.9)

    optimizer = stepped(counting, counting)
    optimizer.base.optimizers[1].seen = 5
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = stepped(counting, counting)
    for one in resumed.base.optimizers:
        one.seen, one.state["updates"] = 100, 100
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert [one.seen for one in resumed.base.optimizers] == [1, 5]
    assert [one.state["updates"] for one in resumed.base.optimizers] == [1, 1]
    resumed.minimize(*batch(1))
    saved = resumed.state_dict()
    with pytest.raises(ValueError, match="of 1 optimizers, got 2: build the same list"):
        resumed.load_state_dict({**saved, "optimizers": saved["optimizers"][:1]})


def test_checkpoint_hooks_of_one_of_the_optimizers_run():
    optimizer = stepped(sgd, adamw)
    seen = []
    one = optimizer.base.optimizers[1]
    one.register_state_dict_post_hook(lambda _, saved: {**saved, "more": 1})
    one.register_load_state_dict_pre_hook(lambda _, saved: seen.append(saved["more"]))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [1]


def test_step_hooks_of_one_of_the_optimizers_run_with_every_update():
    optimizer = stepped(sgd, adamw)
    seen = []
    optimizer.base.optimizers[1].register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.base.optimizers[1].register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.minimize(*batch(1))
    assert seen == ["before", "after"]


def test_the_state_can_be_replaced_as_a_whole():
    optimizer = stepped(sgd, adamw)
    kept = dict(optimizer.state)
    optimizer.state = defaultdict(dict)
    assert len(optimizer.state) == 0
    optimizer.state = kept
    assert [[*one.state] for one in optimizer.base.optimizers] == [
        one.param_groups[0]["params"] for one in optimizer.base.optimizers
    ]
    optimizer.state = optimizer.state
    assert {*optimizer.state} == {*kept}
    optimizer.minimize(*batch(1))


def test_checkpoint_hooks_of_the_whole_run():
    _, optimizer = built()
    seen = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: {**saved, "loaded": 1})
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["more"] == 1
    optimizer.load_state_dict(saved)
    assert seen == ["before saving", "loaded"]


def test_a_hook_that_changes_the_loaded_state_does_not_change_the_callers_checkpoint():
    optimizer = stepped(sgd, adamw)
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: saved.update(loaded=1))
    saved = optimizer.base.state_dict()
    optimizer.base.load_state_dict(saved)
    assert "loaded" not in saved


@pytest.mark.parametrize("kind", ["copied", "pickled"])
def test_a_copy_trains_as_the_original_does(kind):
    model, optimizer = built()
    optimizer.minimize(*batch(0))
    if kind == "copied":
        other, copied = copy.deepcopy((model, optimizer))
    else:
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        other, copied = torch.load(file, weights_only=False)
    for seed in (1, 2):
        optimizer.minimize(*batch(seed))
        copied.minimize(*batch(seed))
    assert_identical([*other.parameters()], [*model.parameters()])


def test_a_scheduler_drives_both_and_a_scaler_skips_both():
    model, optimizer = built(scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    x, y = batch()
    optimizer.minimize(x, y)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.minimize(x * float("inf"), y)
    assert_identical([*model.parameters()], before)
    assert optimizer.scaler.get_scale() == 2.0


@pytest.mark.parametrize(
    ("kinds", "first_momentum"),
    [((sgd, sgd), lambda group: group["momentum"]), ((adamw, adamw), lambda group: group["betas"][0])],
)
def test_one_cycle_drives_the_momentum_of_all_optimizers_if_they_use_the_same_option(kinds, first_momentum):
    optimizer = stepped(*kinds)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=4)
    seen = []
    for seed in range(3):
        seen.append([first_momentum(group) for group in optimizer.param_groups])
        optimizer.minimize(*batch(seed))
        schedule.step()
    assert seen[0] == [0.95, 0.95]
    assert seen[1] == pytest.approx([0.85, 0.85], abs=0.03)  # total_steps=4: the peak lies between two steps
    assert [group["max_lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def test_with_momentum_and_betas_each_optimizer_needs_a_one_cycle_schedule_of_its_own():
    optimizer = stepped(sgd, adamw)
    with pytest.raises(ValueError, match="cycle_momentum"):  # torch's: it would write one option into all groups
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=4) for one in optimizer.base.optimizers
    ]
    seen = []
    for seed in range(3):
        first, second = optimizer.param_groups
        seen.append((first["momentum"], second["betas"][0]))
        optimizer.minimize(*batch(seed))
        for schedule in schedules:
            schedule.step()
    assert seen[0] == (0.95, 0.95)
    assert seen[1][0] == seen[1][1] < 0.9


def test_the_modes_of_optimizers_that_have_them_are_reached_through_the_wrapper():
    optimizer = stepped(lambda params: ScheduleFree(params, lr=0.1), adamw)
    for one in (optimizer, copy.deepcopy(optimizer)):
        one.eval()
        assert one.base.optimizers[0].mode == "eval"
        one.train()
        assert one.base.optimizers[0].mode == "train"
    both = stepped(*[lambda params: ScheduleFree(params, lr=0.1)] * 2)
    both.eval()
    assert [one.mode for one in both.base.optimizers] == ["eval", "eval"]
    with pytest.raises(AttributeError, match="'SAM' object has no attribute 'eval'"):
        stepped(sgd, adamw).eval()


def test_no_base_optimizer_may_step_while_the_weights_are_perturbed():
    model, optimizer = built()
    x, y = batch()
    optimizer.criterion(model(x), y).backward()
    optimizer.ascend()
    for one in optimizer.base.optimizers:
        with pytest.raises(RuntimeError, match="perturbed now"):
            one.step()


def test_lists_of_optimizers_that_cannot_be_combined_are_refused():
    model = mlp()
    matrices, others = split(model)
    sgd = torch.optim.SGD(matrices, lr=0.1)
    with pytest.raises(ValueError, match="parameter in common"):
        bisam.SAM([sgd, torch.optim.SGD(model.parameters(), lr=0.1)], model)
    with pytest.raises(ValueError, match="empty list"):
        bisam.SAM([], model)
    with pytest.raises(TypeError, match="or a list of them, got a list of Parameter"):
        bisam.SAM([*model.parameters()], model)
    with pytest.raises(TypeError, match="or a list of them, got a list of SGD, list"):
        bisam.SAM([sgd, [torch.optim.SGD(others, lr=0.1)]], model)
    with pytest.raises(ValueError, match="have a parameter in common"):
        bisam.SAM([sgd, sgd], model)
    with pytest.raises(TypeError, match="LBFGS"):
        bisam.SAM([sgd, torch.optim.LBFGS(others)], model)
    optimizer = bisam.SAM([sgd, torch.optim.SGD(others, lr=0.1)], model)
    with pytest.raises(ValueError, match=r"several base optimizers \(SGD, SGD\): add the group to one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    for used in (sgd, optimizer.base, [optimizer.base], [optimizer.base, torch.optim.SGD([torch.ones(2)], lr=0.1)]):
        with pytest.raises(TypeError, match="is the base of a sharpness-aware optimizer already"):
            bisam.SAM(used, model)


@pytest.mark.parametrize("of", ["original", "copy"])
def test_a_group_with_a_parameter_of_another_optimizer_is_refused_and_not_added(of):
    _, optimizer = built()
    if of == "copy":
        optimizer = copy.deepcopy(optimizer)
    first, second = optimizer.base.optimizers
    [theirs, _], new = second.param_groups[0]["params"], nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"SGD and AdamW, have a parameter in common, of shape \(\d+,\): give each"):
        first.add_param_group({"params": iter([new, theirs])})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    with pytest.raises(ValueError, match="more than one parameter group"):  # torch's own, within an optimizer
        first.add_param_group({"params": first.param_groups[0]["params"][:1]})
    first.add_param_group({"params": new})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1, 2]


def test_an_optimizer_that_outlives_its_list_accepts_any_parameter():
    _, optimizer = built()
    first, second = optimizer.base.optimizers
    del optimizer
    gc.collect()
    first.add_param_group({"params": second.param_groups[0]["params"]})
    assert len(first.param_groups) == 2


def test_a_checkpoint_taken_after_a_group_was_added_resumes_bitwise():
    runs = []
    for _ in range(2):
        model, optimizer = built()
        model.scale = nn.Parameter(torch.ones(1, 4))
        model.register_forward_hook(lambda module, _, output: output * module.scale[:, : output.shape[1]].mean())
        optimizer.base.optimizers[0].add_param_group({"params": [model.scale], "rho": 0.2})
        runs.append((model, optimizer))
    (model, optimizer), (other, resumed) = runs
    optimizer.minimize(*batch(0))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["rho"] for group in resumed.param_groups] == [0.05, 0.2, 0.05]
    for seed in (1, 2):
        optimizer.minimize(*batch(seed))
        resumed.minimize(*batch(seed))
    assert_identical([*other.parameters()], [*model.parameters()])


def test_a_list_of_one_optimizer_is_that_optimizer():
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    assert bisam.SAM([base], model).base is base


def test_the_state_reads_and_writes_through_to_each_optimizer():
    model = mlp()
    first, second = two(model)
    both = Combined([first, second])
    weight, bias = model[0].parameters()
    both.state[weight], both.state[bias] = {"step": 1}, {"step": 2}
    assert (first.state[weight], second.state[bias]) == ({"step": 1}, {"step": 2})
    assert (len(both.state), [*both.state]) == (2, [weight, bias])
    del both.state[bias]
    assert bias not in second.state
    assert bias not in both.state
    assert both.state.get(bias, "none") == "none"
    assert len(second.state) == 0  # reading it has made no entry
    assert both.state[bias] == {}  # as a torch optimizer's
    with pytest.raises(KeyError, match="no optimizer has this parameter"):
        both.state[torch.ones(3)] = {}
    del both.state[bias]
    with pytest.raises(KeyError):
        del both.state[bias]


def test_the_groups_of_several_optimizers_cannot_be_replaced_as_a_whole():
    model = mlp()
    first, *others = model.parameters()
    optimizer = bisam.SAM([torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(others)], model)
    with pytest.raises(AttributeError, match="change the groups of each"):
        optimizer.param_groups = optimizer.param_groups
