"""Data-parallel and sharded training, in two real processes, against one process that does the same alone."""

import itertools
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import bisam
from bisam.tensors import buckets, distributed

import ranks
from family import BASES, VARIANTS, WITH_CLOSURE, assert_close, assert_identical, batch, build, closure_of, kind_of, mlp

STEPS = 3
ALIKE = [name for name in WITH_CLOSURE if kind_of(name) != "RSAM"]  # equal perturbations for equal gradients
SIMPLE = [name for name in ALIKE if kind_of(name) in ("SAM", "ASAM", "FisherSAM")]


on_cpu = pytest.mark.skipif(
    torch.__version__ < "2.7", reason="torch 2.6 cannot run fully_shard, nor batch norm of DTensors, on a CPU"
)


def data(seed):
    return batch(seed, dtype=torch.float64)


def build_replicas(variant, base="SGD(foreach)", wrap=None, **options):
    torch.manual_seed(0)
    module = mlp().double()
    model = DistributedDataParallel(module, **(wrap or {}))
    return model, VARIANTS[variant](BASES[base](model.parameters()), model, **options)


def weights_of(model):
    return [buckets.full(p.detach()).clone() for p in model.parameters()]


# DistributedDataParallel


def train_replicas(variants, sharpness, form, wrap):
    results = {}
    for variant in variants:
        model, optimizer = build_replicas(variant, wrap=wrap, sharpness=sharpness)
        for seed in range(STEPS):
            x, y = (ranks.mine(t) for t in data(seed))
            if form == "step":
                optimizer.step(closure_of(model, optimizer, x, y))
            else:
                optimizer.minimize(x, y, accumulate=2 if form == "accumulate" else 1)
        results[variant] = weights_of(model)
    return results


@pytest.mark.parametrize(
    ("form", "wrap"),
    [("step", {}), ("minimize", {"gradient_as_bucket_view": True}), ("accumulate", {"find_unused_parameters": True})],
)
def test_two_ranks_with_global_perturbation_equal_one_process_with_the_whole_batch(form, wrap):
    first, second = ranks.run(train_replicas, ALIKE, "global", form, wrap)
    for variant in ALIKE:
        model, optimizer = build(variant, net=mlp, dtype=torch.float64)
        for seed in range(STEPS):
            optimizer.minimize(*data(seed))
        assert_close(first[variant], weights_of(model), 1e-12)
        assert_identical(first[variant], second[variant])


@pytest.mark.parametrize(("form", "wrap"), [("step", {"gradient_as_bucket_view": True}), ("accumulate", {})])
def test_two_ranks_with_local_perturbation_average_the_gradients_at_two_perturbed_points(form, wrap):
    first, second = ranks.run(train_replicas, SIMPLE, "local", form, wrap)
    for variant in SIMPLE:
        assert_close(first[variant], perturb_each_half(variant), 1e-12)
        assert_identical(first[variant], second[variant])


def train_beside_another(module, model, form, *, is_sharded=False, **options):
    """The last layer has an optimizer of its own, which steps every second time only."""
    *body, weight, bias = module.parameters()
    optimizer = bisam.BiSAM(torch.optim.SGD(body, lr=0.1), model, rho=0.1, **options)
    head = torch.optim.SGD([weight, bias], lr=0.1)
    for seed in range(2 * STEPS):
        x, y = map(ranks.mine, data(seed)) if is_sharded or model is not module else data(seed)
        if form == "step":
            optimizer.step(closure_of(model, optimizer, x, y))
        elif form == "list":
            optimizer.step([closure_of(model, optimizer, x[s], y[s]) for s in (slice(0, 5), slice(5, None))])
        else:
            optimizer.minimize(x, y, accumulate=2 if form == "accumulate" else 1)
        if seed % 2:
            head.step()
            head.zero_grad()
    return weights_of(model)


FORMS = ("step", "list", "minimize", "accumulate", "micro-batches")
WRAPS = ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True})


def train_replicas_beside_another():
    results = {}
    for form, wrap, sharpness in itertools.product(FORMS, range(len(WRAPS)), ("local", "global")):
        torch.manual_seed(0)
        module = mlp().double()
        model = DistributedDataParallel(module, **WRAPS[wrap])
        micro = 4 if form == "micro-batches" else None
        results[form, wrap, sharpness] = train_beside_another(
            module, model, form, sharpness=sharpness, micro_batch=micro
        )
    return results


def test_ranks_keep_equal_weights_where_another_optimizer_steps_a_part_of_the_model():
    first, second = ranks.run(train_replicas_beside_another)
    alone = {}
    for micro in (None, 4, 8):  # 8 samples of the 16 are a rank's
        torch.manual_seed(0)
        module = mlp().double()
        alone[micro] = train_beside_another(module, module, "minimize", micro_batch=micro)
    for form, wrap, sharpness in first:
        assert_identical(first[form, wrap, sharpness], second[form, wrap, sharpness])
        if form != "micro-batches":
            same = alone[None if sharpness == "global" else 8]
        elif sharpness == "local":
            same = alone[4]
        else:  # a micro-batch is that of both ranks, half of each
            same = first[form, 0, "global"]
        assert_close(first[form, wrap, sharpness], same, 1e-12)


def train_sharded_beside_another(wrapped):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    results = {}
    for form in ("step", "list", "minimize", "accumulate"):
        torch.manual_seed(0)
        module = mlp().double()
        mesh = init_device_mesh("cpu", (ranks.RANKS,))
        for layer in module if wrapped == "layers" else ():
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        results[form] = train_beside_another(module, module, form, is_sharded=True)
    return results


@on_cpu
@pytest.mark.parametrize("wrapped", ["whole", "layers"])
def test_sharded_ranks_equal_one_process_where_another_optimizer_steps_a_part_of_the_model(wrapped):
    """The gradients of one group of FSDP2 are views of one buffer."""
    first, _ = ranks.run(train_sharded_beside_another, wrapped)
    torch.manual_seed(0)
    module = mlp().double()
    alone = train_beside_another(module, module, "minimize")
    for weights in first.values():
        assert_close(weights, alone, 1e-12)


def train_locally():
    """Every variant, each rank with its own perturbation: the ranks must keep equal weights in all of them."""
    results = {}
    for variant in VARIANTS:
        model, optimizer = build_replicas(variant, sharpness="local")
        for seed in range(STEPS):
            optimizer.minimize(*(ranks.mine(t) for t in data(seed)))
        results[variant] = weights_of(model)
    micro = []
    for wrap in ({}, {"gradient_as_bucket_view": True}):
        model, optimizer = build_replicas("mSAM", wrap=wrap, sharpness="local", micro_batch=4)
        for seed in range(STEPS):
            optimizer.minimize(*(ranks.mine(t) for t in data(seed)))
        micro.append(weights_of(model))
    return results, micro


def test_ranks_keep_equal_weights_in_every_variant_and_micro_batches_spread_over_them():
    (first, micro), (second, _) = ranks.run(train_locally)
    for variant in VARIANTS:
        assert_identical(first[variant], second[variant])
    model, optimizer = build("mSAM", net=mlp, dtype=torch.float64, micro_batch=4)
    for seed in range(STEPS):
        optimizer.minimize(*data(seed))
    for weights in micro:
        assert_close(weights, weights_of(model), 1e-12)
    for variant in (name for name in VARIANTS if kind_of(name) in ("GSAM", "LookSAM")):  # which average at w too
        model, optimizer = build(variant, net=mlp, dtype=torch.float64, micro_batch=8)
        for seed in range(STEPS):
            optimizer.minimize(*data(seed))
        assert_close(first[variant], weights_of(model), 1e-12)


def refuse_random_numbers():
    with pytest.raises(ValueError, match="draws random numbers, and ranks would not draw the same"):
        build_replicas("ESAM", sharpness="global")
    return True


def test_global_sharpness_is_refused_for_variants_that_draw_random_numbers():
    assert ranks.run(refuse_random_numbers) == [True, True]


def perturb_each_half(variant):
    """One process: a perturbation for each half of the batch, and the mean of the gradients there."""
    model, optimizer = build(variant, net=mlp, dtype=torch.float64)
    for seed in range(STEPS):
        x, y = data(seed)
        gradients = []
        for half in zip(x.chunk(2), y.chunk(2), strict=True):
            optimizer.criterion(model(half[0]), half[1]).backward()
            optimizer.ascend()
            optimizer.criterion(model(half[0]), half[1]).backward()
            gradients.append([p.grad for p in model.parameters()])
            optimizer.restore()
            optimizer.zero_grad()
        for p, a, b in zip(model.parameters(), *gradients, strict=True):
            p.grad = (a + b) / 2
        optimizer.base.step()
        optimizer.zero_grad()
    return weights_of(model)


def count_all_reduces(sharpness, accumulate):
    _, optimizer = build_replicas("BiSAM(log)", sharpness=sharpness)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for seed in range(STEPS):
            optimizer.minimize(*(ranks.mine(t) for t in data(seed)), accumulate=accumulate)
        dist.barrier()  # the threads of gloo record an operation after it has given its result
    return sum(event.name == "gloo:all_reduce" for event in profile.events())


def test_gradients_are_averaged_once_per_step_if_local_and_twice_if_global():
    assert ranks.run(count_all_reduces, None, 1) == [STEPS, STEPS]  # local is the default with DDP
    assert ranks.run(count_all_reduces, "local", 2) == [STEPS, STEPS]
    assert ranks.run(count_all_reduces, "global", 2) == [2 * STEPS, 2 * STEPS]


def overflow_on_one_rank():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer = build_replicas("BiSAM(log)", scaler=scaler)
    before = weights_of(model)
    x, y = (ranks.mine(t) for t in data(0))

    def overflowing():
        scaler.scale(optimizer.criterion(model(x), y)).backward()
        if optimizer.phase == "ascent" and dist.get_rank() == 1:
            next(model.parameters()).grad.fill_(float("inf"))

    optimizer.step(overflowing)
    return scaler.get_scale(), weights_of(model), before


def test_an_overflow_on_one_rank_skips_the_update_on_both():
    for scale, after, before in ranks.run(overflow_on_one_rank):
        assert scale == 4.0
        assert_identical(after, before)


def refuse_gradients_of_before(wrap):
    """By hand after a step, then a step that is refused in the middle of its work, and one that is not."""
    model, optimizer = build_replicas("BiSAM(log)", wrap=wrap, sharpness="global")
    x, y = (ranks.mine(t) for t in data(0))

    def closure():
        loss = optimizer.criterion(model(x), y)
        loss.backward()
        return loss

    optimizer.minimize(x, y)
    optimizer.zero_grad()
    closure()
    optimizer.ascend()
    closure()
    optimizer.descend()
    model.module[0].weight.square().sum().backward()
    with pytest.raises(RuntimeError, match="found gradients from before"):
        optimizer.step(closure)
    optimizer.zero_grad()
    optimizer.step(closure)
    return weights_of(model)


@pytest.mark.parametrize("wrap", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-4}])
def test_replicas_train_correctly_after_a_refused_step(wrap):
    first, second = ranks.run(refuse_gradients_of_before, wrap)
    assert_identical(first, second)
    model, optimizer = build("BiSAM(log)", net=mlp, dtype=torch.float64)
    for _ in range(3):
        optimizer.minimize(*data(0))
    assert_close(first, weights_of(model), 1e-12)


def train_lists(wrap, clears):
    """Steps on lists of two closures, each of which clears through the model, or does not clear."""
    _, optimizer = build_replicas("BiSAM(log)", wrap=wrap, sharpness="global")

    def closure(x, y):
        if clears:
            optimizer.model.zero_grad()
        loss = optimizer.criterion(optimizer.model(x), y)
        loss.backward()
        return loss

    for seed in range(STEPS):
        x, y = (ranks.mine(t).chunk(2) for t in data(seed))
        optimizer.step([partial(closure, *part) for part in zip(x, y, strict=True)])
    return weights_of(optimizer.model)


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("wrap", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_ranks_average_the_sum_of_a_list_of_closures(wrap, clears):
    first, second = ranks.run(train_lists, wrap, clears)
    assert_identical(first, second)
    model, optimizer = build("BiSAM(log)", net=mlp, dtype=torch.float64)
    for seed in range(STEPS):
        optimizer.minimize(*data(seed))
    assert_close(first, weights_of(model), 1e-12)


def train_unequal_parts(name, form):
    """After three steps alike, the first rank has one part of a batch where the second has two."""
    options = {"micro_batch": 6} if form == "micro-batches" else {}
    model, optimizer = build_replicas(name, sharpness="local", **options)
    rank = dist.get_rank()
    for seed in range(STEPS + 1):
        x, y = (ranks.mine(t) for t in data(seed))
        several = seed == STEPS and rank == 1
        if form == "list":
            parts = zip(x.chunk(1 + several), y.chunk(1 + several), strict=True)
            optimizer.step([closure_of(model, optimizer, *part) for part in parts])
        elif form == "micro-batches":
            optimizer.minimize(*((x, y) if several else (x[:6], y[:6])))
        else:
            size = len(x) if several or seed < STEPS else 1
            optimizer.minimize(x[:size], y[:size], accumulate=2 if seed == STEPS else 1)
    return weights_of(model)


@pytest.mark.parametrize("form", ["list", "micro-batches", "accumulate"])
@pytest.mark.parametrize("name", ["SAM", "GSAM(log)"])
def test_ranks_keep_equal_weights_where_one_has_more_parts_of_a_batch_than_the_other(name, form):
    first, second = ranks.run(train_unequal_parts, name, form)
    assert_identical(first, second)


class Branches(torch.nn.Module):
    """A trunk, and a branch that changes with the rank, with the pass, or not at all."""

    def __init__(self, which):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = torch.nn.Linear(6, 4)
        self.branches = torch.nn.ModuleList(
            [torch.nn.Linear(6, 4), torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 4))]
        )
        self.which, self.passes = which, 0
        self.double()

    def forward(self, x):
        self.passes += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        first = int(self.passes % 4 == 1)  # of the four of two micro-batches
        return self.trunk(x) + self.branches[{"rank": rank, "pass": self.passes % 2, "first": first}[self.which]](x)


def leave_out_backward(optimizer, x, y):
    """A closure without a backward pass in the second pass."""
    loss = optimizer.criterion(optimizer.model(x), y)
    if optimizer.phase == "ascent":
        loss.backward()
    return loss


def train_branches():
    """Weights with a branch for each rank, with one for each pass, and those of a rank that is a group of its own."""
    results = {}
    for variant in ("SAM", "GSAM", "LookSAM"):
        for which in ("rank", "pass"):
            model = DistributedDataParallel(Branches(which), find_unused_parameters=True)
            base = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = VARIANTS[variant](base, model)
            for seed in range(STEPS):
                optimizer.minimize(*(ranks.mine(t) for t in data(seed)))
            results[variant, which] = weights_of(model)
    for variant, sharpness in itertools.product(("SAM", "GSAM(log)"), ("local", "global")):
        model = DistributedDataParallel(Branches("first"), find_unused_parameters=True)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = VARIANTS[variant](base, model, micro_batch=4, sharpness=sharpness)
        for seed in range(2 * STEPS):
            optimizer.minimize(*(ranks.mine(t) for t in data(seed)))
        results[variant, "first", sharpness] = weights_of(model)
    groups = [dist.new_group([rank]) for rank in range(ranks.RANKS)]
    for variant in ("GSAM", "LookSAM"):
        _, optimizer = build_replicas(variant, wrap={"process_group": groups[dist.get_rank()]})
        for seed in range(STEPS):
            optimizer.minimize(*(ranks.mine(t) for t in data(seed)))
        results[variant, "alone"] = weights_of(optimizer.model)
    _, optimizer = build_replicas("SAM", wrap={"find_unused_parameters": True})
    with pytest.raises(RuntimeError, match=r"step\(\) found no gradients"):
        optimizer.step(partial(leave_out_backward, optimizer, *(ranks.mine(t) for t in data(0))))
    return results


def test_ranks_and_passes_may_use_different_parameters_and_ranks_different_process_groups():
    first, second = ranks.run(train_branches)
    for variant in ("SAM", "GSAM", "LookSAM"):
        for which in ("rank", "pass"):
            assert_identical(first[variant, which], second[variant, which])
    for case in itertools.product(("SAM", "GSAM(log)"), ["first"], ("local", "global")):
        assert_identical(first[case], second[case])
    model = Branches("pass")
    optimizer = VARIANTS["SAM"](torch.optim.SGD(model.parameters(), lr=0.1), model, micro_batch=8)
    for seed in range(STEPS):
        optimizer.minimize(*data(seed))
    assert_close(first["SAM", "pass"], weights_of(model), 1e-12)
    for variant in ("GSAM", "LookSAM"):  # a rank that is a group of its own trains as one process
        for rank, weights in enumerate([first, second]):
            model, optimizer = build(variant, net=mlp, dtype=torch.float64)
            for seed in range(STEPS):
                optimizer.minimize(*(t.chunk(ranks.RANKS)[rank] for t in data(seed)))
            assert_close(weights[variant, "alone"], weights_of(model), 1e-12)


def refuse_join_and_zero_redundancy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import uses what torch deprecates
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model, optimizer = build_replicas("SAM")
    x, y = (ranks.mine(t) for t in data(0))
    before = weights_of(model)
    refused = pytest.raises(
        RuntimeError, match=r"join\(\) stands in for a rank.*Give every rank the same number of batches"
    )
    with refused, model.join():
        optimizer.minimize(x, y, accumulate=2)
    assert_identical(before, weights_of(model))
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(TypeError, match="keeps on each rank the state of some parameters only"):
        bisam.MSAM(sharded, model)
    return True


def test_join_and_a_zero_redundancy_optimizer_under_momentum_sam_are_refused():
    assert ranks.run(refuse_join_and_zero_redundancy) == [True, True]


def train_static_graph():
    with pytest.raises(ValueError, match=r'averages in its first pass, which is an ascent.*use sharpness="global"'):
        build_replicas("SAM", wrap={"static_graph": True})
    for wrap, accumulate in (({}, 2), ({"find_unused_parameters": True}, 1)):
        model, optimizer = build_replicas("SAM", wrap={"static_graph": True, **wrap}, sharpness="global")
        before = weights_of(model)
        with pytest.raises(ValueError, match=r"this step averages after its passes.*Use static_graph=False"):
            optimizer.minimize(*(ranks.mine(t) for t in data(0)), accumulate=accumulate)
        assert_identical(before, weights_of(model))
    model, optimizer = build_replicas("SAM", wrap={"static_graph": True}, sharpness="global")
    for seed in range(STEPS):
        optimizer.minimize(*(ranks.mine(t) for t in data(seed)), accumulate=2 if seed else 1)
    return weights_of(model)


def test_a_static_graph_is_averaged_if_its_first_pass_averages_and_refused_otherwise():
    model, optimizer = build("SAM", net=mlp, dtype=torch.float64)
    for seed in range(STEPS):
        optimizer.minimize(*data(seed))
    for weights in ranks.run(train_static_graph):
        assert_close(weights, weights_of(model), 1e-12)


def why_not_recorded():
    """For each way to wrap a model, over gloo, and as if gloo were NCCL."""
    found = {}
    ways = {"plain": {}, "unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
    for name, wrap in ways.items():
        _, optimizer = build_replicas("BiSAM(log)", wrap=wrap, sharpness="global")
        found[name] = optimizer._sync.unrecordable()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed, "_backend", lambda replica: "nccl")
            found[f"{name}, nccl"] = optimizer._sync.unrecordable()
            if name == "plain":
                optimizer.model.register_comm_hook(None, default_hooks.allreduce_hook)
                found["hook"] = optimizer._sync.unrecordable()
        optimizer._sync.prepare_recording()
    _, optimizer = build("BiSAM(log)", net=mlp)
    found["not wrapped"] = optimizer._sync.unrecordable()
    return found


def test_reasons_why_collectives_cannot_be_recorded_in_a_graph_are_named():
    for found in ranks.run(why_not_recorded):
        assert "DistributedDataParallel's backend is gloo" in found["plain"]
        assert found["plain, nccl"] is None
        assert "find_unused_parameters=True decides on the host" in found["unused, nccl"]
        assert "static_graph=True" in found["static, nccl"]
        assert "communication hooks" in found["hook"]
        assert "not wrapped by DistributedDataParallel" in found["not wrapped"]


# FSDP2


def tokens(seed):
    """Batches of which the first has only tokens of the first rank's shard."""
    x, y = data(seed)
    return (x[:, 0].abs() * 100).long() % (4 if seed == 0 else 8), y


def embedding():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(8, 5), torch.nn.Linear(5, 4)).double()


def train_an_embedding_in_shards():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(embedding(), mesh=init_device_mesh("cpu", (ranks.RANKS,)))
    optimizer = VARIANTS["FriendlySAM"](BASES["SGD(foreach)"](model.parameters()), model)
    for seed in range(STEPS):
        optimizer.minimize(*(ranks.mine(t) for t in tokens(seed)))
    return weights_of(model)


@on_cpu
def test_the_memory_of_a_variant_starts_in_the_same_step_in_every_shard():
    model = embedding()
    optimizer = VARIANTS["FriendlySAM"](BASES["SGD(foreach)"](model.parameters()), model)
    for seed in range(STEPS):
        optimizer.minimize(*tokens(seed))
    for weights in ranks.run(train_an_embedding_in_shards):
        assert_close(weights, weights_of(model), 1e-12)


def train_shards(base):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks.RANKS,))
    results = {}
    for variant in ALIKE:
        torch.manual_seed(0)
        model = mlp().double()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = VARIANTS[variant](BASES[base](model.parameters()), model, clip_norm=0.1)
        with pytest.raises(ValueError, match="no meaning for sharded parameters"):
            VARIANTS[variant](BASES[base](model.parameters()), model, sharpness="local")
        for seed in range(STEPS):
            x, y = (ranks.mine(t) for t in data(seed))
            before = [buckets.local(p).clone() for p in model.parameters()]
            if variant in SIMPLE:
                optimizer.zero_grad()
                optimizer.criterion(model(x), y).backward()
                optimizer.ascend()
                optimizer.restore()
                assert_identical([buckets.local(p) for p in model.parameters()], before)
                optimizer.zero_grad()
            optimizer.minimize(x, y)
        results[variant] = (weights_of(model), optimizer.telemetry.descent_norm, optimizer.telemetry.ascent_norm)
    return results


@on_cpu
@pytest.mark.parametrize("base_name", ["SGD(foreach)", "Adam"])
def test_sharded_parameters_equal_one_process_with_the_whole_batch(base_name):
    for result in ranks.run(train_shards, base_name):
        for variant in ALIKE:
            model, optimizer = build(variant, base_name, net=mlp, dtype=torch.float64, clip_norm=0.1)
            for seed in range(STEPS):
                optimizer.minimize(*data(seed))
            weights, descent_norm, ascent_norm = result[variant]
            assert_close(weights, weights_of(model), 1e-10)
            torch.testing.assert_close(descent_norm, optimizer.telemetry.descent_norm)
            torch.testing.assert_close(ascent_norm, optimizer.telemetry.ascent_norm)


def checkpoint_shards(folder, variant):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    memory = f"{folder}/memory-{dist.get_rank()}.pt"

    def fresh():
        torch.manual_seed(0)
        model = sharded(mlp().double())
        return model, VARIANTS[variant](BASES["Adam"](model.parameters()), model)

    model, optimizer = fresh()
    for seed in range(4):
        if seed == 2:
            weights, state = get_state_dict(model, optimizer.base)
            checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
            torch.save(optimizer.state_dict().get("sharpness"), memory)
        optimizer.minimize(*(ranks.mine(t) for t in data(seed)))
    resumed, resumed_optimizer = fresh()
    weights, state = get_state_dict(resumed, resumed_optimizer.base)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(resumed, resumed_optimizer.base, model_state_dict=weights, optim_state_dict=state)
    memory_state = torch.load(memory, weights_only=True)
    if memory_state is not None:
        resumed_optimizer.load_state_dict({**resumed_optimizer.base.state_dict(), "sharpness": memory_state})
    for seed in range(2, 4):
        resumed_optimizer.minimize(*(ranks.mine(t) for t in data(seed)))
    return weights_of(model), weights_of(resumed)


@on_cpu
@pytest.mark.parametrize("variant_name", ["BiSAM(log)", "LookSAM", "FriendlySAM"])
def test_a_distributed_checkpoint_of_model_base_and_memory_resumes_bitwise(variant_name, tmp_path):
    for weights, resumed in ranks.run(checkpoint_shards, str(tmp_path), variant_name):
        assert_identical(resumed, weights)


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (ranks.RANKS,)))


def fail_in_the_second_pass():
    """What the model computes before a step whose second pass raises, and after it."""
    torch.manual_seed(0)
    model = sharded(mlp().double())
    optimizer = VARIANTS["SAM"](BASES["SGD(foreach)"](model.parameters()), model)
    x, y = data(0)

    def closure():
        loss = optimizer.criterion(model(x), y)
        if optimizer.phase == "descent":
            raise KeyError("in the second pass")
        loss.backward()

    with torch.no_grad():
        before = model(x)
    with pytest.raises(KeyError):
        optimizer.step(closure)
    with torch.no_grad():
        return before, model(x)


@on_cpu
def test_after_a_second_pass_that_raised_a_sharded_model_computes_as_before():
    for before, after in ranks.run(fail_in_the_second_pass):
        assert_identical([after], [before])


def train_without_resharding():
    torch.manual_seed(0)
    model = sharded(mlp().double())
    model.set_reshard_after_backward(False)
    optimizer = VARIANTS["SAM"](BASES["SGD(foreach)"](model.parameters()), model)
    for seed in range(STEPS):
        optimizer.minimize(*(ranks.mine(t) for t in data(seed)))
    return weights_of(model)


@on_cpu
def test_gathered_weights_are_not_reused_after_the_perturbation():
    model, optimizer = build("SAM", net=mlp, dtype=torch.float64)
    for seed in range(STEPS):
        optimizer.minimize(*data(seed))
    for weights in ranks.run(train_without_resharding):
        assert_close(weights, weights_of(model), 1e-12)


class Parallel(torch.nn.Module):
    """Layers for tensor parallelism beside plain ones, with buffers of either kind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6), torch.nn.Linear(6, 4)
        self.normed, self.seen = torch.nn.BatchNorm1d(6), torch.nn.BatchNorm1d(4)
        self.double()

    def forward(self, x):
        return self.seen(self.head(self.normed(x + self.down(torch.tanh(self.up(x))))))


def train_in_parallel(variants):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    results = {}
    for variant in variants:
        model, mesh = Parallel(), init_device_mesh("cpu", (ranks.RANKS,))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        distribute_module(
            model.normed,
            mesh,
            input_fn=lambda _, inputs, mesh: tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs),
            output_fn=lambda _, output, mesh: output.to_local(),
        )
        optimizer = VARIANTS[variant](torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, clip_norm=0.1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.minimize(*data(0))
            dist.barrier()
        collectives = sum(event.name == "gloo:all_reduce" for event in profile.events())
        for seed in range(1, STEPS):
            optimizer.minimize(*data(seed))
        buffers = [buckets.full(buffer).clone() for buffer in model.buffers()]
        results[variant] = [*weights_of(model), *buffers, optimizer.telemetry.descent_norm], collectives
    return results


@on_cpu
def test_tensor_parallel_layers_beside_plain_ones_equal_one_process():
    variants = ["SAM", "GSAM", "LookSAM"]
    for results in ranks.run(train_in_parallel, variants):
        for variant in variants:
            model = Parallel()
            optimizer = VARIANTS[variant](
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, clip_norm=0.1
            )
            for seed in range(STEPS):
                optimizer.minimize(*data(seed))
            found, collectives = results[variant]
            expected = [*weights_of(model), *model.buffers(), optimizer.telemetry.descent_norm]
            assert_close([t.double() for t in found], [t.double() for t in expected], 1e-12)
            # one for the norm of the ascent, one for clipping, one for each of two products, whatever the layers
            assert collectives - results["SAM"][1] <= 2


def refuse_flat_shards():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match=r"would divide by the norm of its own. Use fully_shard"):
        VARIANTS["SAM"](BASES["SGD(foreach)"](model.parameters()), model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, ranks.RANKS), mesh_dim_names=("dp", "tp"))
    layer = parallelize_module(torch.nn.Linear(6, 4), mesh["tp"], ColwiseParallel())
    model = DistributedDataParallel(layer, device_mesh=mesh["dp"])
    with pytest.raises(TypeError, match=r"replaced the DTensors.*Use fully_shard \(FSDP2\) with the mesh"):
        VARIANTS["SAM"](BASES["SGD(foreach)"](model.parameters()), model)
    return True


@pytest.mark.filterwarnings("ignore")  # torch's, of its older API
def test_sharding_whose_parameters_look_whole_is_refused():
    assert ranks.run(refuse_flat_shards) == [True, True]


def test_a_norm_of_shards_in_half_precision_needs_no_wide_copy_of_all():
    assert all(peak < 0.5 for peak in ranks.run(peak_of_a_norm))


def peak_of_a_norm():
    """Memory of a norm over that of the gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks.RANKS,))
    shards = [distribute_tensor(torch.ones(4096, 16, dtype=torch.bfloat16), mesh, [Shard(0)]) for _ in range(16)]
    with torch.profiler.profile(profile_memory=True) as profile:
        norm = buckets.norm_of([shards])
    assert norm.item() == 1024.0
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak / sum(buckets.local(shard).nbytes for shard in shards)


# A search of ρ


def search_for_rho(wrap):
    """With validation data that give no finite loss, except in the first rank."""

    def make_optimizer(model, rho):
        wrapped = DistributedDataParallel(model) if wrap == "replicas" else sharded(model)
        return bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), wrapped, rho=rho, sharpness="global")

    x, y = data(9)
    return bisam.find_rho(
        lambda: mlp().double(),
        make_optimizer,
        [tuple(ranks.mine(t) for t in data(seed)) for seed in range(2)],
        [(x if dist.get_rank() == 0 else x * float("nan"), y)],
        rhos=(0, 0.1),
        epochs=6,  # longer than the interval between two checks of the weights
        repeats=2,
    )


@pytest.mark.parametrize("wrap", ["replicas", pytest.param("shards", marks=on_cpu)])
def test_find_rho_on_ranks_returns_the_result_of_the_first_rank_which_is_that_of_one_process(wrap):
    first, second = ranks.run(search_for_rho, wrap)
    assert first == second
    alone = bisam.find_rho(
        lambda: mlp().double(),
        lambda model, rho: bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, rho=rho),
        [data(0), data(1)],
        [data(9)],
        rhos=(0, 0.1),
        epochs=6,
        repeats=2,
    )
    assert (first.rho, first.steps) == (alone.rho, alone.steps)
    for ours, theirs in zip(first.points, alone.points, strict=True):
        assert ours.accuracies == theirs.accuracies
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)


# Options


def test_an_unknown_value_of_sharpness_is_refused():
    words = 'sharpness must be "local", "global" or None, got \'per-rank\''
    with pytest.raises(ValueError, match=words):
        build(sharpness="per-rank")
    _, optimizer = build()
    with pytest.raises(ValueError, match=words):
        optimizer.sharpness = "per-rank"
    assert optimizer.sharpness is None


def train_by_hand(sharpness, averaged, changed):
    model, optimizer = build_replicas("SAM", sharpness=None if changed else sharpness)
    if changed:
        optimizer.sharpness = sharpness
    for seed in range(STEPS):
        x, y = (ranks.mine(t) for t in data(seed))
        with nullcontext() if averaged else model.no_sync():
            optimizer.criterion(model(x), y).backward()
        optimizer.ascend()
        optimizer.criterion(model(x), y).backward()
        optimizer.descend()
    return weights_of(model)


def train_by_hand_each_way():
    found = {
        "global": train_by_hand("global", averaged=True, changed=False),
        "changed to global": train_by_hand("global", averaged=True, changed=True),
        "local": train_by_hand("local", averaged=False, changed=False),
        "default": train_by_hand(None, averaged=False, changed=False),
    }
    with pytest.warns(UserWarning, match=r"averaged its gradients.*run the first pass inside of") as warned:
        found["default, averaged"] = train_by_hand(None, averaged=True, changed=False)
    assert len(warned) == 1
    return found


def test_by_hand_the_perturbation_uses_the_gradients_as_the_first_pass_left_them_averaged_or_not():
    first, second = ranks.run(train_by_hand_each_way)
    model, optimizer = build("SAM", net=mlp, dtype=torch.float64)
    for seed in range(STEPS):
        optimizer.minimize(*data(seed))
    for how in first:
        assert_identical(first[how], second[how])
        expected = perturb_each_half("SAM") if how in ("local", "default") else weights_of(model)
        assert_close(first[how], expected, 1e-12)


def resume_without_wrapper():
    model, trained = build("SAM", net=mlp, dtype=torch.float64, start=1)
    trained._sync.has_warned_of_separate_models = True
    for seed in range(STEPS):
        trained.minimize(*data(seed))
    model = DistributedDataParallel(model)
    optimizer = VARIANTS["SAM"](BASES["SGD(foreach)"](model.parameters()), start=1)
    optimizer.load_state_dict(trained.state_dict())
    with pytest.raises(RuntimeError, match=r"was not given the wrapper: all ranks would be perturbed alike"):
        optimizer.step(closure_of(model, optimizer, *data(0)))
    return True


def test_a_wrapper_that_the_optimizer_was_not_given_is_refused_also_after_resuming():
    assert ranks.run(resume_without_wrapper) == [True, True]


def misuse_replicas():
    torch.manual_seed(0)
    module = mlp().double()
    with pytest.raises(ValueError, match=r"needs to see it: give the wrapped model"):
        VARIANTS["SAM"](BASES["SGD(foreach)"](module.parameters()), module, sharpness="local")
    apart = mlp().double()
    optimizer = VARIANTS["SAM"](BASES["SGD(foreach)"](apart.parameters()), apart)
    x, y = (ranks.mine(t) for t in data(0))
    with pytest.warns(UserWarning, match=r"each of the 2 ranks trains a model of its own.*set optimizer.model"):
        optimizer.minimize(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        optimizer.minimize(x, y)
    optimizer = VARIANTS["SAM"](BASES["SGD(foreach)"](module.parameters()), module)
    optimizer.model = DistributedDataParallel(module)  # as frameworks do: the optimizer first, the wrapper later
    optimizer.minimize(x, y)
    return weights_of(module)


def test_an_unwrapped_model_warns_and_wrapping_it_after_building_the_optimizer_works():
    first, second = ranks.run(misuse_replicas)
    assert_identical(first, second)


def test_a_norm_of_mixed_types_is_the_norm_of_all():
    tensors = [[torch.randn(5)], [torch.randn(3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)]]
    expected = torch.cat([t.double().flatten() for bucket in tensors for t in bucket]).norm()
    torch.testing.assert_close(buckets.norm_of(tensors).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_of_half_precision_gradients_is_computed_in_float32(dtype):
    tensors = [torch.randn(1000).to(dtype) * 100 for _ in range(50)]  # its square overflows float16
    expected = torch.cat([t.double() for t in tensors]).norm()
    norm = buckets.norm_of([tensors])
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)


class Sequences(torch.nn.Module):
    """A norm before layers that tensor parallelism divides: each rank has the norm's gradient of its samples only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = torch.nn.LayerNorm(6), torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)
        self.double()

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def sequence_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(),
    }
    return parallelize_module(Sequences(), init_device_mesh("cpu", (ranks.RANKS,)), plan)


def train_sequences(variants):
    results = {}
    for variant in variants:
        model = sequence_parallel()
        optimizer = VARIANTS[variant](torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for seed in range(STEPS):
            x, y = data(seed)
            part = ranks.mine(x)  # of the sequence; every rank has all labels
            if variant in SIMPLE:
                optimizer.criterion(model(part), y).backward()
                optimizer.ascend()
                optimizer.criterion(model(part), y).backward()
                optimizer.descend()
            else:
                optimizer.step(closure_of(model, optimizer, part, y))
        results[variant] = weights_of(model)
    return results


@on_cpu
def test_partial_gradients_of_sequence_parallel_layers_are_summed_over_the_ranks():
    variants = ["SAM", "ASAM", "GSAM", "LookSAM", "FriendlySAM", "FisherSAM"]
    for results in ranks.run(train_sequences, variants):
        for variant in variants:
            model = Sequences()
            optimizer = VARIANTS[variant](torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
            for seed in range(STEPS):
                optimizer.step(closure_of(model, optimizer, *data(seed)))
            assert_close(results[variant], weights_of(model), 1e-12)


def refuse_diagnostics_of_shards():
    model = sequence_parallel()
    with pytest.raises(TypeError, match=r"divided among processes .* Gather the weights into an undivided copy"):
        bisam.diagnostics.sharpness(model, data(0), 0.1)


@on_cpu
def test_diagnostics_of_a_model_divided_among_ranks_are_refused_with_an_explanation():
    ranks.run(refuse_diagnostics_of_shards)
