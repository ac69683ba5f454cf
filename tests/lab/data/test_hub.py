import sys
from types import SimpleNamespace

import pytest
import torch

from bisam.lab.data import DataError, Stream, load


def test_a_data_set_of_the_hub_is_downloaded_and_decoded(tiny, register, hub_layout, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")  # it accepts a folder in place of a name of the hub
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    register(hub_layout.dataset, hub=str(tiny))
    data = load("tiny", cache=tmp_path / "cache", log=lambda _: None)
    assert torch.equal(data.train.pixels, torch.from_numpy(hub_layout.contents("train")[0]))
    assert torch.equal(data.test.labels, torch.from_numpy(hub_layout.contents("test")[1]))
    stream = Stream(str(tiny), batch=4, device="cpu", seed=0, augment=False, size=7, workers=0)
    assert len(stream) == 6


def test_without_the_datasets_package_the_error_names_it_and_an_alternative(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"nobody/tiny .*package datasets.*pip install datasets, or give a folder"):
        load("tiny", cache=tmp_path / "cache")


def test_a_failed_download_is_reported_with_its_cause(tiny, tmp_path, monkeypatch):
    def fail(name):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset_builder=fail))
    with pytest.raises(DataError, match=r"nobody/tiny .*ConnectionError: no route.*or give a folder.*train-\*"):
        load("tiny", cache=tmp_path / "cache")
