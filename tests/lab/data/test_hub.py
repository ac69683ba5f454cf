import sys
from types import SimpleNamespace

import pytest
import torch

from bisam.lab.data import DataError, Stream, load


def test_a_name_of_the_hub_is_downloaded_and_decoded(tiny, register, hub_layout, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")  # which takes a folder for the name of one of its data sets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    register(hub_layout.dataset, hub=str(tiny))
    data = load("tiny", cache=tmp_path / "cache", log=lambda _: None)
    assert torch.equal(data.train.pixels, torch.from_numpy(hub_layout.contents("train")[0]))
    assert torch.equal(data.test.labels, torch.from_numpy(hub_layout.contents("test")[1]))
    stream = Stream(str(tiny), batch=4, device="cpu", seed=0, augment=False, size=7, workers=0)
    assert len(stream) == 6


def test_without_the_package_its_name_and_the_way_around_are_told(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"nobody/tiny .*package datasets.*pip install datasets, or give a folder"):
        load("tiny", cache=tmp_path / "cache")


def test_a_download_that_fails_says_why(tiny, tmp_path, monkeypatch):
    def fail(name):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset_builder=fail))
    with pytest.raises(DataError, match=r"nobody/tiny .*ConnectionError: no route.*or give a folder.*train-\*"):
        load("tiny", cache=tmp_path / "cache")
