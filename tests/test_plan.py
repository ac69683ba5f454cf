import pytest
import torch

from bisam.engine.objective_options import per_sample
from bisam.plan import Batch, HighestLoss, MostSensitive


@pytest.mark.parametrize(("pieces", "sizes"), [(1, [10]), (2, [5, 5]), (3, [4, 4, 2]), (20, [1] * 10)])
def test_parts_cover_the_batch_in_order(pieces, sizes):
    batch = Batch(torch.arange(20).view(10, 2), torch.arange(10))
    parts = batch.split(pieces)
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat([part.x for part in parts]), batch.x)
    assert torch.equal(torch.cat([part.y for part in parts]), batch.y)


def test_inputs_that_are_not_per_sample_are_passed_to_every_part():
    x = {"words": torch.arange(4), "nested": (torch.arange(4), torch.tensor(7)), "flag": True}
    for part in Batch(x, torch.arange(4)).split(2):
        assert len(part.x["words"]) == len(part.x["nested"][0]) == 2
        assert part.x["nested"][1] == 7
        assert part.x["flag"] is True


def test_splitting_into_one_part_returns_the_batch_itself():
    batch = Batch(torch.randn(4, 2), torch.arange(4))
    (same,) = batch.split(1)
    assert same is batch


def test_plans_choose_the_samples_of_the_largest_rise_or_of_the_highest_loss():
    batch = Batch(torch.arange(4), torch.arange(4))
    before, after = torch.tensor([0.0, 5.0, 1.0, 1.0]), torch.tensor([3.0, 5.0, 3.0, 2.0])
    assert MostSensitive(0.5).for_descent(batch, before, lambda _: after).y.tolist() == [0, 2]
    assert HighestLoss(1).for_ascent(batch, lambda _: before).y.tolist() == [1]
    assert len(HighestLoss(None).for_ascent(batch, lambda _: before)) == 2


@pytest.mark.parametrize(("size", "kept"), [(1, 1), (6, 3), (7, 4)])
def test_half_of_a_batch_is_rounded_up(size, kept):
    batch = Batch(torch.arange(size), torch.arange(size))
    assert len(HighestLoss(None).for_ascent(batch, lambda part: part.y)) == kept


def test_the_score_of_a_sample_with_many_labels_is_their_mean():
    logits, target = torch.randn(3, 5, 7), torch.randint(5, (3, 7))
    each = per_sample(torch.nn.CrossEntropyLoss(), logits, target)
    torch.testing.assert_close(each.mean(), torch.nn.functional.cross_entropy(logits, target))
