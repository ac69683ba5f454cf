"""Encoded images of any size, decoded into squares of one."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from bisam.lab.data.images import DataError
from bisam.lab.data.parquet import FORMATS, MOST_PIXELS
from bisam.lab.data.visible_files import counted_by_ending
from bisam.lab.files import read_file

READ = (*FORMATS, "BMP", "GIF", "PPM", "TIFF")
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
LARGEST_FILE = 256 * 2**20
ORIENTATION = ExifTags.Base.Orientation
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
"""How an image is turned that has this orientation."""
TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")
GREY = (128, 128, 128, 255)
"""Behind what is transparent: dark and light shapes differ from it."""
MOST_BROKEN = 0.01
"""Part of the images that may fail to decode, but always one: these are left out. More are refused."""
MOST_NAMED = 10
"""Images that do not decode and are named, with the fault of each; of more, their number."""


class EncodedImage:
    """The bytes of an image and its name, or the path of the file that has them."""

    def __init__(self, name: str, content: bytes | None = None, path: Path | None = None) -> None:
        self.name, self._content, self._path = name, content, path

    def __bytes__(self) -> bytes:
        if self._content is not None:
            return self._content
        assert self._path is not None
        return read_file(self._path, LARGEST_FILE)


def decode(images: Sequence[EncodedImage], size: int) -> Tensor:
    """All as squares of that side, RGB, uint8 (N, 3, size, size). They must decode: see `broken`."""
    pixels = np.empty((len(images), size, size, 3), dtype=np.uint8)

    def one(place: int) -> None:
        with _opened(images[place]) as image:
            pixels[place] = np.asarray(square(to_rgb(image), size))

    with _workers() as pool:
        for _ in pool.map(one, range(len(images))):
            pass
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def to_rgb(image: Image.Image) -> Image.Image:
    """As it is shown: turned as its camera says, 16 bits scaled to 8, transparent places grey."""
    is_wide = image.mode.startswith("I;16") or _is_pgm(image)
    turned = _turned(image)
    if is_wide:
        turned = Image.fromarray((np.asarray(turned).astype(np.uint16) >> 8).astype(np.uint8))
    if turned.mode not in TRANSPARENT and "transparency" not in turned.info:
        return turned.convert("RGB")
    seen = turned.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", seen.size, GREY), seen).convert("RGB")


def _turned(image: Image.Image) -> Image.Image:
    """By the orientation in its EXIF data. EXIF data that cannot be read are ignored."""
    image.load()
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:  # broken EXIF data raise many kinds
        return image
    return image.transpose(TURNS[orientation]) if orientation in TURNS else image


def _is_pgm(image: Image.Image) -> bool:
    """Whether it is a grey image of 16 bits in the format that is read as one of 32."""
    return image.format == "PPM" and image.mode == "I"


def broken(images: Sequence[EncodedImage]) -> dict[int, str]:
    """Places of the images that do not decode, and why."""
    with _workers() as pool:
        faults = pool.map(_fault, images)
        return {place: fault for place, fault in enumerate(faults) if fault}


def check_broken(images: Sequence[EncodedImage], where: str, log: list[str]) -> list[int]:
    """Places of the images that are kept. DataError if more than one, and more than `MOST_BROKEN`, do not decode."""
    found = broken(images)
    if not found:
        return list(range(len(images)))
    text, most = f"{where}: {described(found, images)}", max(1, int(MOST_BROKEN * len(images)))
    if len(found) > most:
        allowed = "one is" if most == 1 else f"{most} ({MOST_BROKEN:.0%}) are"
        raise DataError(f"{text}. At most {allowed} left out: repair or remove them")
    log.append(f"{text}. Left out")
    return [place for place in range(len(images)) if place not in found]


def described(faults: Mapping[int, str], images: Sequence[EncodedImage]) -> str:
    """How many images do not decode, which ones, and why: `faults` is what `broken` returns.

    >>> described({1: "it is damaged"}, [EncodedImage("1.png"), EncodedImage("2.png")])
    '1 of 2 images do not decode: 2.png (it is damaged)'
    """
    named = ", ".join(f"{images[place].name} ({fault})" for place, fault in [*faults.items()][:MOST_NAMED])
    more = f" and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
    return f"{len(faults)} of {len(images)} images do not decode: {named}{more}"


def note_of_unread(files: Iterable[Path]) -> list[str]:
    """A line if some of these files are no images, by their endings.

    >>> note_of_unread([Path("cat/1.png"), Path("cat/2.heic")])
    ['1 file is not read: 1 .heic. Images end in .png, .jpg, .jpeg, .webp, .bmp, .gif, .ppm, .pgm, .tif, .tiff']
    """
    others = [path for path in files if not is_image(path)]
    if not others:
        return []
    are = "file is" if len(others) == 1 else "files are"
    return [f"{len(others)} {are} not read: {counted_by_ending(others)}. Images end in {', '.join(ENDINGS)}"]


def is_image(path: Path) -> bool:
    """Whether the name of a file ends as that of an image that can be read."""
    return path.suffix.lower() in ENDINGS


def square(image: Image.Image, size: int) -> Image.Image:
    """The largest square at the centre, scaled to that side."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `_opened` refuses what it warns of
        yield pool


def _fault(image: EncodedImage) -> str:
    try:
        with _opened(image) as opened:
            opened.load()
            if opened.mode in ("I", "F") and not _is_pgm(opened):
                return "its pixels are 32-bit numbers, whose range is not known: save it with 8 or 16 bits"
    except UnidentifiedImageError:
        return f"it is damaged, or not one of {', '.join(READ)}"
    except Exception as error:  # broken images raise a dozen kinds
        return str(error).splitlines()[0][:100] if str(error) else type(error).__name__
    return ""


def _opened(image: EncodedImage) -> Image.Image:
    opened = Image.open(io.BytesIO(bytes(image)), formats=READ)
    width, height = opened.size
    if width * height > MOST_PIXELS:
        raise DataError(f"it is {width}×{height}, and at most {MOST_PIXELS:,} pixels are decoded")
    return opened
