import pytest
import torch

from bisam import batches


@pytest.mark.parametrize(("pieces", "sizes"), [(1, [10]), (2, [5, 5]), (3, [4, 4, 2]), (20, [1] * 10)])
def test_parts_cover_the_batch_in_order(pieces, sizes):
    x, y = torch.arange(20).view(10, 2), torch.arange(10)
    parts = batches.split(x, y, pieces)
    assert [len(part) for _, part in parts] == sizes
    assert torch.equal(torch.cat([a for a, _ in parts]), x)
    assert torch.equal(torch.cat([b for _, b in parts]), y)


def test_what_is_not_per_sample_goes_to_every_part():
    x = {"words": torch.arange(4), "nested": (torch.arange(4), torch.tensor(7)), "flag": True}
    for part, _ in batches.split(x, torch.arange(4), 2):
        assert len(part["words"]) == len(part["nested"][0]) == 2
        assert part["nested"][1] == 7
        assert part["flag"] is True


def test_the_whole_batch_is_handed_on_as_it_is():
    x = torch.randn(4, 2)
    ((same, _),) = batches.split(x, torch.arange(4), 1)
    assert same.data_ptr() == x.data_ptr()
