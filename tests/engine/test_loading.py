"""Checkpoints: of the base alone, of other models and optimizers, with hooks, into bases that load by themselves."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import bisam
from bisam import SAM

from family import (
    VARIANTS,
    assert_identical,
    batch,
    build,
    mlp,
    tensors,
)


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(variant):
    model, optimizer = build(variant, net=mlp)
    optimizer.minimize(*batch())
    before, groups = tensors(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    other = VARIANTS[variant](torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(other.state_dict())
    assert_identical(tensors(model, optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups


def test_a_checkpoint_of_the_base_optimizer_alone_keeps_the_options_of_each_group():
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "rho": 0.0, "adaptive": False}]
    optimizer = bisam.ASAM(torch.optim.SGD(groups, lr=0.1), model)
    plain = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.5)
    optimizer.load_state_dict(plain.state_dict())
    assert [(g["lr"], g["rho"], g["adaptive"]) for g in optimizer.param_groups] == [(0.5, 2.0, True), (0.5, 0.0, False)]


def stepped(kind):
    """An optimizer around one of this kind, after a step."""
    model = mlp()
    optimizer = SAM(kind(model.parameters(), lr=0.01), model)
    optimizer.minimize(*batch())
    return optimizer


@pytest.mark.parametrize(
    ("saved", "into", "lacks"),
    [
        (torch.optim.SGD, torch.optim.AdamW, "betas, eps"),
        (partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW, "betas, .*eps"),  # torch fails while it loads
        (torch.optim.AdamW, torch.optim.SGD, "dampening, momentum"),
        (torch.optim.Adam, torch.optim.Adagrad, "initial_accumulator_value, lr_decay"),
    ],
)
def test_a_checkpoint_of_another_kind_of_optimizer_is_refused_and_changes_nothing(saved, into, lacks):
    optimizer, checkpoint = stepped(into), stepped(saved).state_dict()
    groups, state = optimizer.param_groups, optimizer.state
    with pytest.raises(ValueError, match=f"another kind of optimizer than {into.__name__}: .* no {lacks}"):
        optimizer.load_state_dict(checkpoint)
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    optimizer.minimize(*batch())


def test_an_option_that_an_optimizer_removes_from_its_groups_is_not_required_in_a_checkpoint():
    class Own(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr)
            self.defaults["decay"] = 0.5
            for group in self.param_groups:
                group.pop("decay", None)

    optimizer, checkpoint = stepped(Own), stepped(Own).state_dict()
    checkpoint["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(checkpoint)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_hook_may_convert_a_checkpoint_of_another_kind_of_optimizer():
    optimizer, checkpoint = stepped(torch.optim.AdamW), stepped(torch.optim.SGD).state_dict()
    own = optimizer.base.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda *_: own)
    optimizer.load_state_dict(checkpoint)
    optimizer.minimize(*batch())


class WithLaterOption(torch.optim.SGD):
    """An optimizer that treats an option of its checkpoints as optional, without a `__setstate__` for it."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.defaults["cautious"] = None
        for group in self.param_groups:
            group["cautious"] = None

    def step(self, closure=None):
        assert all(group.get("cautious") is None for group in self.param_groups)
        super().step(closure)


def test_a_checkpoint_without_an_option_that_was_added_later_loads():
    optimizer = stepped(WithLaterOption)
    optimizer.load_state_dict(stepped(torch.optim.SGD).state_dict())
    optimizer.minimize(*batch())


def test_a_checkpoints_own_rho_is_loaded():
    _, optimizer = build("SAM", net=mlp, rho=0.3)
    _, other = build("SAM", net=mlp, rho=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["rho"] == 0.3


def test_checkpoint_hooks_run_whether_registered_on_the_optimizer_or_its_base():
    _, optimizer = build(net=mlp)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("saving"))
    optimizer.base.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saving", "saved", "loading", "loaded"]


def test_a_checkpoint_loaded_into_the_base_keeps_the_radius_of_each_group():
    model = mlp()
    groups = [{"params": [model[0].weight], "rho": 0.2}, {"params": [model[2].weight], "rho": 0.0}]
    plain = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[2].weight]}], lr=0.3).state_dict()
    for load in ("base", "optimizer"):
        optimizer = SAM(torch.optim.SGD([dict(group) for group in groups], lr=0.1), model, rho=0.05)
        (optimizer.base if load == "base" else optimizer).load_state_dict(plain)
        assert [(group["rho"], group["lr"]) for group in optimizer.param_groups] == [(0.2, 0.3), (0.0, 0.3)]
        copied = copy.deepcopy(optimizer)
        copied.base.load_state_dict(plain)
        assert [group["rho"] for group in copied.param_groups] == [0.2, 0.0]


class LoadsByItself(torch.optim.SGD):
    """As 8-bit optimizers do, without a hook."""

    def load_state_dict(self, state_dict):
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            kept = group["params"]
            group.clear()
            group.update({**loaded, "params": kept})


def test_a_base_with_its_own_load_state_dict_keeps_the_radius_of_each_group():
    model = mlp()
    groups = [{"params": [model[0].weight], "rho": 0.2}, {"params": [model[2].weight], "rho": 0.0}]
    plain = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[2].weight]}], lr=0.3).state_dict()
    optimizer = SAM(LoadsByItself(groups, lr=0.1), model, rho=0.05)
    optimizer.load_state_dict(plain)
    assert [(group["rho"], group["lr"]) for group in optimizer.param_groups] == [(0.2, 0.3), (0.0, 0.3)]


@pytest.mark.parametrize("name", ["LookSAM", "FriendlySAM", "VaSSO"])
def test_a_group_that_is_removed_is_not_in_the_checkpoint(name):
    model, optimizer = build(name, net=mlp)
    optimizer.add_param_group({"params": [extra := nn.Parameter(torch.ones(4))]})
    x, y = batch()
    loss = (optimizer.criterion(model(x) * extra, y) for _ in range(2))
    optimizer.step(lambda: next(loss).backward())
    del optimizer.param_groups[-1], optimizer.state[extra]
    state = optimizer.state_dict()
    build(name, net=mlp)[1].load_state_dict(state)
