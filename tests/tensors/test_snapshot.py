import copy
import warnings

import pytest
import torch
from torch import nn

from bisam import KSAM, SAM, BiSAM
from bisam.tensors.snapshot import BufferSnapshot, Snapshot

from family import assert_close, assert_identical, batch, build, mlp


class HandMadeNorm(nn.Module):
    """Batch statistics as people write them: replaced, updated through .data, counted, and one that is None."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("nothing", None)
        self.register_buffer("scratch", torch.zeros(6), persistent=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        self.variance.data.mul_(0.9).add_(0.1 * x.var(0).detach())
        self.calls += 1
        self.scratch.copy_(self.head.weight.detach().sum(0))
        return self.head((x - self.mean) / self.variance.sqrt())


def test_buffers_are_restored_however_a_module_changes_them(plain_variant):
    model, optimizer = build(plain_variant, net=HandMadeNorm)
    once, _ = build(plain_variant, net=HandMadeNorm)
    x, y = batch()
    once(x)
    optimizer.minimize(x, y)
    assert_identical(list(model.buffers()), list(once.buffers()))
    assert model.calls == 1


def test_norms_of_other_classes_are_restored_too():
    def net():
        return nn.Sequential(
            nn.Unflatten(1, (1, 6)),
            nn.InstanceNorm1d(1, track_running_stats=True),
            nn.BatchNorm1d(1, momentum=None),
            nn.Flatten(),
            nn.LazyBatchNorm1d(),
            nn.Linear(6, 4),
        )

    x, y = batch()
    torch.manual_seed(0)
    model = net()
    model(x)  # the lazy layer gets its size
    once = copy.deepcopy(model)
    once(x)
    BiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model).minimize(x, y)
    assert_identical(list(model.buffers()), list(once.buffers()))


class Irregular(nn.Module):
    """Buffers that cannot be written to, that are None until the second pass, that are born in it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("expanded", torch.ones(1).expand(6))
        with torch.inference_mode():
            self.register_buffer("inferred", torch.ones(6))
        self.register_buffer("late", None)
        self.head = nn.Linear(6, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            self.late = x.mean(0)
            self.register_buffer("newborn", x.mean(0))
        return self.head(x * self.expanded)


def test_buffers_that_cannot_be_written_are_skipped_and_those_added_by_the_second_pass_are_removed():
    model, optimizer = build(net=Irregular)
    optimizer.minimize(*batch())
    assert model.calls == 2
    assert model.late is None
    assert not hasattr(model, "newborn")
    optimizer.minimize(*batch())


def test_a_buffer_that_appears_during_training_is_restored():
    model, optimizer = build()
    optimizer.minimize(*batch())
    model.register_buffer("seen", torch.zeros(()))

    def count(module, *_):
        module.seen += 1

    model.register_forward_hook(count)
    optimizer.minimize(*batch())
    assert model.seen == 1


def test_a_snapshot_reuses_its_memory_and_keeps_the_layout():
    tensors = [torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last), torch.randn(7)]
    snapshot = Snapshot()
    snapshot.save(tensors)
    memory = [c.data_ptr() for c in snapshot.copies]
    saved = [t.clone() for t in tensors]
    for t in tensors:
        t.zero_()
    snapshot.restore()
    assert_identical(tensors, saved)
    snapshot.save(tensors)
    assert [c.data_ptr() for c in snapshot.copies] == memory
    assert snapshot.copies[0].stride() == tensors[0].stride()


def test_a_buffer_snapshot_without_a_model_does_nothing():
    snapshot = BufferSnapshot(None)
    snapshot.save()
    snapshot.restore()
    assert not snapshot._tables


class OnAGraph(nn.Module):
    """With a sparse buffer, such as the adjacency of a graph, in either layout."""

    def __init__(self):
        super().__init__()
        adjacency = torch.eye(6).roll(1, 0)
        self.register_buffer("rows", adjacency.to_sparse_csr())
        self.register_buffer("pairs", adjacency.to_sparse())
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head((self.rows @ x.T + self.pairs @ x.T).T)


def test_sparse_buffers_are_not_replaced():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        model, optimizer = build(net=OnAGraph)
    before = [*model.buffers()]
    optimizer.minimize(*batch())
    assert all(a is b for a, b in zip(model.buffers(), before, strict=True))


def test_copies_of_another_set_of_tensors_replace_the_old_ones_without_more_memory():
    snapshot, held = Snapshot(), 0
    tensors = [torch.zeros(1000) for _ in range(8)]
    with torch.profiler.profile(profile_memory=True) as profile:
        snapshot.save(tensors)
        snapshot.save(tensors[:7])
    peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert peak <= 1.1 * sum(tensor.nbytes for tensor in tensors)
    assert len(snapshot.copies) == 7


class Resized(nn.Module):
    """A buffer that takes on the size of the batch, in place, as observers of quantisation do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(0))

    def forward(self, x):
        self.last.resize_(len(x)).copy_(x.detach().mean(1))
        return x


def test_the_size_and_values_of_a_buffer_that_a_pass_resizes_are_restored():
    x, y = batch()
    model = nn.Sequential(Resized(), mlp())
    optimizer = BiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    last = model[0].last
    for size in (16, 5):
        optimizer.criterion(model(x), y).backward()
        optimizer.ascend()
        optimizer.criterion(model(x[:size]), y[:size]).backward()
        optimizer.descend()
        assert model[0].last is last
        assert torch.equal(last, x.mean(1))
    kept = model[0].last.clone()
    KSAM(torch.optim.SGD(model.parameters(), lr=0.1), model).minimize(x, y)  # the second pass has half of the samples
    assert torch.equal(model[0].last, kept)


def test_weights_are_restored_also_if_restoring_the_buffers_fails(monkeypatch):
    model, optimizer = build()
    x, y = batch()
    weights = [p.detach().clone() for p in model.parameters()]

    def fails():
        raise RuntimeError("no memory for the buffers")

    monkeypatch.setattr(optimizer._buffers, "restore", fails)
    with pytest.raises(RuntimeError, match="no memory for the buffers"):
        optimizer.minimize(x, y)
    assert not optimizer.perturbed
    assert_identical([p.detach() for p in model.parameters()], weights)


@pytest.mark.parametrize("end", ["descend", "restore"])
def test_a_step_by_hand_ends_also_if_restoring_the_buffers_fails(end, monkeypatch):
    model, optimizer = build("BiSAM(log)")
    x, y = batch()

    def fails():
        raise RuntimeError("no memory for the buffers")

    optimizer.criterion(model(x), y).backward()
    optimizer.ascend()
    optimizer.criterion(model(x), y).backward()
    with monkeypatch.context() as broken:
        broken.setattr(optimizer._buffers, "restore", fails)
        with pytest.raises(RuntimeError, match="no memory for the buffers"):
            getattr(optimizer, end)()
    assert not optimizer.perturbed
    optimizer.zero_grad()
    assert optimizer.phase == "ascent"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own
def test_a_torchscript_model_trains_as_its_module_does():
    model, optimizer = build("SAM", net=lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)))
    script = torch.jit.script(copy.deepcopy(model))
    twin = SAM(torch.optim.SGD(script.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4), script)
    for seed in range(3):
        optimizer.minimize(*batch(seed))
        twin.minimize(*batch(seed))
    assert_close([*script.state_dict().values()], [*model.state_dict().values()], 1e-6)
