import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from bisam.lab import records
from bisam.lab.data import DATA_SETS, DataSet
from bisam.lab.recipes import find_recipe
from bisam.lab.records import Record

SIDE, CLASSES = 6, 4
SAMPLES = {"train": 24, "test": 8}
TINY = DataSet(
    "tiny",
    classes=CLASSES,
    samples=SAMPLES,
    mean=(0.5,) * 3,
    std=(0.25,) * 3,
    size=SIDE,
    hub="nobody/tiny",
    image="img",
    balanced=True,
)


def pixels_and_labels(split):
    """Balanced labels, and channels that all have the same pixels in another order: their means are 0.5."""
    draws = np.random.default_rng(["train", "test"].index(split))
    values = np.linspace(0, 255, SIDE * SIDE).round().astype(np.uint8)
    count = SAMPLES[split]
    pixels = np.stack([draws.permutation(values).reshape(SIDE, SIDE) for _ in range(3 * count)])
    return pixels.reshape(count, 3, SIDE, SIDE), np.arange(count) % CLASSES


def encoded(image, kind="PNG"):
    """An array (C, H, W), or a PIL image, as the bytes of a file."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image.transpose(1, 2, 0))
    buffer = io.BytesIO()
    image.save(buffer, format=kind, lossless=True)
    return buffer.getvalue()


def write_file(path, images, labels, image="img", label="label", row_group=5):
    """Writes a Parquet file in the hub's layout; the images are encoded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    structs = pa.array(
        [None if data is None else {"bytes": data, "path": f"{number}.png"} for number, data in enumerate(images)],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    labels = pa.array(labels) if isinstance(labels, list) else pa.array(np.asarray(labels))
    pq.write_table(pa.table({image: structs, label: labels}), path, row_group_size=row_group)


def write_split(folder, split, shards=1, kind="PNG", **options):
    pixels, labels = pixels_and_labels(split)
    images = [encoded(image, kind) for image in pixels]
    edges = np.linspace(0, len(labels), shards + 1).astype(int)
    for number in range(shards):
        part = slice(edges[number], edges[number + 1])
        path = folder / f"{split}-{number:05d}-of-{shards:05d}.parquet"
        write_file(path, images[part], labels[part], **options)


@pytest.fixture
def hub_layout():
    """Functions that write folders in the hub's layout."""
    return SimpleNamespace(
        contents=pixels_and_labels, encoded=encoded, write_file=write_file, write_split=write_split, dataset=TINY
    )


@pytest.fixture
def register(monkeypatch):
    """Registers a data set by its name, for one test."""

    def add(dataset, **changes):
        dataset = replace(dataset, **changes)
        monkeypatch.setitem(DATA_SETS, dataset.name, dataset)
        return dataset

    return add


@pytest.fixture
def tiny(tmp_path, register):
    """The folder of a data set that `load("tiny", folder)` takes."""
    register(TINY)
    folder = tmp_path / "tiny"
    write_split(folder, "train", shards=2)
    write_split(folder, "test")
    return folder


@pytest.fixture(scope="session")
def tiny_networks(tmp_path_factory):
    """Folders of transformers networks with random weights, by the recipe that they stand in for."""
    import transformers

    root = tmp_path_factory.mktemp("networks")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "dog", "cat", "sat"]
    (root / "vocab.txt").write_text("\n".join(words))
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=160, **small)
    vit = transformers.ViTConfig(image_size=16, patch_size=8, **small)
    models = {"glue": transformers.BertModel(bert), "finetune": transformers.ViTModel(vit)}
    for name, model in models.items():
        model.save_pretrained(root / name)
    transformers.BertTokenizerFast(vocab=str(root / "vocab.txt")).save_pretrained(root / "glue")
    return {name: root / name for name in models}


@pytest.fixture(scope="session")
def recorded():
    """Makes the record of an invented run."""
    return record_of


@pytest.fixture(scope="session")
def write_run():
    """Writes a record's folder as a training does."""

    def write(folder, record):
        with records.RunFolder.open(folder, record.config) as run:
            for row in record.metrics:
                run.metrics.append(row)
            if record.receipt is not None:
                run.receipt(record.receipt)
            if record.result is not None:
                run.finish(record.result)
        return folder

    return write


def record_of(
    cell, seed=0, accuracy=90.0, *, trained=2, status="done", result=None, receipt=None, folder=None, **fields
):
    """A run of a cell such as demo/40%/sam, with other values in some fields. Without an accuracy it is unfinished."""
    (config,) = find_recipe(cell).cells.values()
    config = replace(config, seed=seed, **fields)
    metrics = [
        {"epoch": epoch, "lr": 0.1, "loss": 2.0 - 0.1 * epoch, "validation_accuracy": 50.0 + epoch, "seconds": 1.0,
         "together": 1, "samples_per_second": 1000.0}
        for epoch in range(trained)
    ]  # fmt: skip
    if config.method != "sgd":
        metrics = [{**row, "perturbed_loss": row["loss"] + 0.25, "flips": 1.5} for row in metrics]
    whole = {"status": status, "epochs": trained, "best_epoch": trained - 1, "validation_accuracy": 55.5}
    whole |= {"test_accuracy": accuracy, "seconds": float(trained), **(result or {})}
    folder = folder or Path("runs") / f"{cell.replace('/', '-')}-seed{seed}"
    return Record(folder, config.as_dict(), metrics, None if accuracy is None else whole, receipt)
