"""Data by name: small image sets whole, as tensors; ImageNet as a stream from disk."""

from bisam.lab.data.catalogue import DATA_SETS, find_dataset
from bisam.lab.data.dataset import DataSet
from bisam.lab.data.images import DataError, Images, ImageSplits
from bisam.lab.data.labels import split, with_noise
from bisam.lab.data.loading import load
from bisam.lab.data.on_device import Batches
from bisam.lab.data.stream import Stream

__all__ = [
    "DATA_SETS",
    "Batches",
    "DataError",
    "DataSet",
    "ImageSplits",
    "Images",
    "Stream",
    "find_dataset",
    "load",
    "split",
    "with_noise",
]
