"""Folders of images as users have them: hidden copies, other types of files, and a folder around the classes."""

from pathlib import Path

import pytest
from PIL import Image

from bisam.lab.data.images import DataError
from bisam.lab.data.new_samples import open_new
from bisam.lab.data.own import open_dataset
from bisam.lab.data.own_source import OwnData
from bisam.lab.data.preparation import Preparation
from bisam.lab.data.visible_files import counted_by_ending

LIKE = Preparation("image", ("rose", "tulip"), size=4, mean=(0.5,) * 3, std=(0.25,) * 3)


@pytest.fixture
def photos(tmp_path):
    for place, name in enumerate(LIKE.classes):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (4, 4), (number, 9 * place, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize(
    "hidden",
    [
        "rose/.ipynb_checkpoints/1.png",
        "rose/._1.png",
        "__MACOSX/rose/._1.png",
        "__MACOSX/rose/1.png",
        ".old/rose/1.png",
        "tulip/more/.thumbs/deep/1.png",
    ],
)
@pytest.mark.parametrize("content", [None, b"no image"])
def test_hidden_files_are_ignored_in_training_and_prediction(hidden, content, photos):
    (photos / hidden).parent.mkdir(parents=True, exist_ok=True)
    (photos / hidden).write_bytes(content or (photos / "rose/1.png").read_bytes())
    dataset, new = open_dataset(str(photos)), open_new(str(photos), LIKE)
    assert (len(dataset.train) + len(dataset.test), dataset.classes) == (12, ["rose", "tulip"])
    assert (len(new), new.unread, new.notes) == (12, {}, [])
    assert not any("not" in note and "image" in note for note in dataset.notes)


def test_a_hidden_table_is_ignored(tmp_path):
    (tmp_path / "flowers.csv").write_text("x,label\n" + "1.5,a\n2.5,b\n" * 6)
    (tmp_path / "._flowers.csv").write_bytes(b"\0\5\26\7")
    assert len(open_dataset(str(tmp_path)).train) == 10


def test_files_of_other_types_are_counted_and_reported(photos):
    for name in ("rose/6.heic", "rose/7.HEIC", "tulip/6.avif"):
        (photos / name).write_bytes(b"")
    line = "3 files are not read: 2 .heic, 1 .avif. Images end in .png"
    assert any(note.startswith(line) for note in OwnData(open_dataset(str(photos))).described())
    assert any(note.startswith(line) for note in open_new(str(photos), LIKE).notes)
    for path in photos.rglob("*.png"):
        path.unlink()
    with pytest.raises(DataError, match=r"has no images \(3 files are not read: 2 \.heic, 1 \.avif\. Images end in"):
        open_dataset(str(photos))


def test_a_single_broken_image_is_excluded_and_several_are_refused_by_name(photos):
    (photos / "rose/1.png").write_bytes(b"no image")
    dataset = open_dataset(str(photos))
    assert len(dataset.train) + len(dataset.test) == 11
    assert any("1 of 12 images do not decode: rose/1.png (it is damaged" in note for note in dataset.notes)
    (photos / "tulip/4.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"2 of 12 images .* rose/1\.png \(.*\), tulip/4\.png \(.*At most one"):
        open_dataset(str(photos))
    for path in photos.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"tulip/3\.png \([^()]*\) and 2 more\. At most one is left out"):
        open_dataset(str(photos))


def test_a_prediction_skips_broken_images_and_reports_them(photos):
    for name in ("rose/1.png", "tulip/4.png"):
        (photos / name).write_bytes(b"no image")
    new = open_new(str(photos), LIKE)
    assert (len(new.names), len(new.inputs), len(new.labels)) == (10, 10, 10)
    assert new.unread == {1: "rose/1.png", 10: "tulip/4.png"}
    (note,) = new.notes
    assert note.startswith("2 of 12 images do not decode: rose/1.png (it is damaged")


def test_a_folder_one_level_too_high_is_refused_with_the_name_of_the_right_one(photos):
    (photos.parent / "__MACOSX").mkdir()
    with pytest.raises(DataError, match=r"folder, photos, whose images are in folders of its own: give \S+/photos$"):
        open_dataset(str(photos.parent))


def test_a_class_folder_may_be_a_symbolic_link(photos, tmp_path):
    (photos / "tulip").rename(tmp_path / "elsewhere")
    (photos / "tulip").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    dataset = open_dataset(str(photos))
    assert (len(dataset.train) + len(dataset.test), dataset.classes) == (12, ["rose", "tulip"])


def test_many_different_file_endings_are_summarised_in_a_short_line():
    paths = [Path(f"{number}.x{number}") for number in range(30)] + [Path("README"), Path("LICENSE")]
    assert counted_by_ending(paths) == ", ".join(["2 without an ending", *(f"1 .x{n}" for n in range(9)), "21 others"])
