"""Decoding: what is whole becomes upright RGB pixels, what is not is set aside with a reason, and nothing leaks."""

from __future__ import annotations

import io
import multiprocessing
import struct
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from siammm.core.errors import SiamMMError
from siammm.data import decode as module
from siammm.data.decode import BadImage, decode, fit, read_size
from tests.data.image_sets import encoded, example_images

PIXELS = example_images(1, size=(12, 20)).images[0]


def saved(image: Image.Image, form: str = "PNG", **settings: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **settings)
    return stream.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes], depth: int = 8, colour: int = 2) -> bytes:
    """A PNG file from its chunks, with a header that may say anything."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunk(*c) for c in chunks) + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_give_their_pixels(form: str) -> None:
    pixels = decode(encoded(PIXELS, form))
    np.testing.assert_array_equal(pixels, PIXELS)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable


@pytest.mark.parametrize(
    ("form", "settings"),
    [("JPEG", {"quality": 95, "subsampling": 0}), ("WEBP", {"quality": 95}), ("AVIF", {"quality": 95})],
)
def test_lossy_formats_give_about_their_pixels(form: str, settings: dict[str, Any]) -> None:
    if form == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    smooth = np.broadcast_to(np.linspace(0, 255, 32, dtype=np.uint8)[:, None, None], (32, 32, 3)).copy()
    assert np.abs(decode(encoded(smooth, form, **settings)).astype(int) - smooth).mean() < 3


def test_bytes_paths_and_files_are_the_same(tmp_path: Path) -> None:
    data = encoded(PIXELS)
    path = tmp_path / "x.png"
    path.write_bytes(data)
    for file in (data, bytearray(data), memoryview(data), path, str(path), io.BytesIO(data)):
        np.testing.assert_array_equal(decode(file), PIXELS)
        assert read_size(memoryview(data)) == (12, 20)


def test_the_content_decides_and_not_the_name(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(encoded(PIXELS))
    np.testing.assert_array_equal(decode(path), PIXELS)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "RGBA", "LA"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    form = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    pixels = decode(saved(image, form))
    assert pixels.shape == PIXELS.shape
    if mode in ("RGB", "RGBA"):
        np.testing.assert_array_equal(pixels, PIXELS)
    elif mode in ("L", "LA"):
        np.testing.assert_array_equal(
            pixels, np.repeat(np.asarray(Image.fromarray(PIXELS).convert("L"))[..., None], 3, 2)
        )


def test_cmyk_jpeg_keeps_its_colours() -> None:
    red = Image.new("RGB", (16, 16), (200, 30, 30))
    pixels = decode(saved(red.convert("CMYK"), "JPEG", quality=95))
    assert np.abs(pixels.reshape(-1, 3).mean(0) - [200, 30, 30]).max() < 8


def test_transparency_is_laid_over_white() -> None:
    image = np.zeros((4, 4, 4), np.uint8)
    image[:2, :, 3] = 255
    image[2, :, 3] = 51
    pixels = decode(saved(Image.fromarray(image)))
    assert (pixels[:2] == 0).all()
    assert (pixels[2] == 204).all()
    assert (pixels[3] == 255).all()


def test_transparency_of_a_palette_is_laid_over_white() -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.paste(1, (0, 0, 4, 2))
    for transparency in (0, b"\x00\xff"):
        pixels = decode(saved(image, transparency=transparency))
        assert (pixels[:2] == [200, 100, 50]).all()
        assert (pixels[2:] == 255).all()


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    values = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    expected = np.round(values / 257).astype(np.uint8)
    for form in ("PNG", "TIFF"):
        pixels = decode(saved(Image.fromarray(values), form))
        np.testing.assert_array_equal(pixels, np.repeat(expected[..., None], 3, 2))


def test_sixteen_bit_portable_greys() -> None:
    values = np.array([[0, 257], [65535, 32896]], ">u2")
    assert decode(b"P5 2 2 65535\n" + values.tobytes())[..., 0].tolist() == [[0, 1], [255, 128]]


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_without_a_range_are_bad(mode: str) -> None:
    with pytest.raises(BadImage, match="32-bit"):
        decode(saved(Image.new(mode, (4, 4), 1), "TIFF"))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_gives_its_first_frame(form: str) -> None:
    frames = [Image.new("RGB", (6, 5), colour) for colour in ("#ff0000", "#00ff00", "#0000ff")]
    settings = {"lossless": True} if form == "WEBP" else {}
    data = saved(frames[0], form, save_all=True, append_images=frames[1:], **settings)
    np.testing.assert_array_equal(decode(data), np.broadcast_to(np.array([255, 0, 0], np.uint8), (5, 6, 3)))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(form: str, orientation: int) -> None:
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = 255
    undo = {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.transpose(1, 0, 2),
        6: lambda x: np.rot90(x, 1),
        7: lambda x: np.rot90(x, 2).transpose(1, 0, 2),
        8: lambda x: np.rot90(x, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(undo[orientation](upright))
    data = saved(Image.fromarray(stored), form, exif=exif)
    pixels = decode(data)
    assert pixels.shape == upright.shape
    assert np.abs(pixels.astype(int) - upright).max() < 40
    assert read_size(data) == (16, 32)


def test_damaged_exif_does_not_cost_the_image() -> None:
    data = encoded(PIXELS, "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff" + b"\xee" * 40)
    assert decode(data).shape == PIXELS.shape


def truncated(form: str) -> bytes:
    data = encoded(example_images(1, size=(64, 64)).images[0], form)
    return data[: len(data) // 2]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"I am no image at all, whatever my name says.", "not an image"),
    "one byte": (b"\xff", "not an image"),
    "HTML": (b"<!doctype html><html><body>404</body></html>", "not an image"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "not an image"),
    "EPS, which would run a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    "a truncated JPEG": (truncated("JPEG"), "damaged"),
    "a truncated PNG": (truncated("PNG"), "damaged"),
    "a truncated GIF": (truncated("GIF"), "damaged"),
    "a truncated WebP": (truncated("WEBP"), "damaged"),
    "a truncated TIFF": (truncated("TIFF"), "damaged"),
    "a JPEG header alone": (encoded(PIXELS, "JPEG")[:20], "damaged"),
    "a PNG that is all header": (png(10, 10), "damaged"),
    "a PNG of 0 pixels": (png(0, 10), "no pixels|damaged"),
    "a PNG bomb by its header": (png(60_000, 60_000, (b"IDAT", zlib.compress(b"\0" * 100))), "limit of 178,956,970"),
    "a PNG with a bomb of text": (
        png(1, 1, (b"zTXt", b"k\0\0" + zlib.compress(b"\0" * 2**27)), (b"IDAT", zlib.compress(b"\0" * 4))),
        "damaged",
    ),
    "a PNG with pixels that are none": (png(10, 10, (b"IDAT", b"not zlib")), "damaged"),
    "a GIF bomb by its header": (b"GIF89a\xff\xff\xff\xff\x00\x00\x00;", "limit|damaged"),
    "a BMP of negative size": (
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 0, 0, 0, 54, 40, -5, -5, 1, 24, *[0] * 6),
        "pixels|damaged",
    ),
    "a TIFF that points nowhere": (b"II*\x00\xff\xff\xff\x7f", "damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_image_is_bad(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(BadImage, match=reason) as caught:
        decode(data)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, SiamMMError)


def test_a_bomb_costs_no_memory() -> None:
    # 13,000 x 13,000 x 3 is half a gigabyte, and under the limit; this one is above it.
    row = zlib.compress(b"\0" * 2**20)
    data = png(20_000, 20_000, (b"IDAT", row))
    tracemalloc.start()
    with pytest.raises(BadImage, match="20000 x 20000"):
        decode(data)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_the_limit_on_pixels_can_be_moved() -> None:
    data = encoded(PIXELS)
    with pytest.raises(BadImage, match="20 x 12 pixels, more than the limit of 239"):
        decode(data, max_pixels=239)
    with pytest.raises(BadImage):
        read_size(data, max_pixels=239)
    assert decode(data, max_pixels=240).shape == PIXELS.shape


def test_the_limit_can_be_above_pillows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert decode(encoded(PIXELS)).shape == PIXELS.shape


def test_a_file_of_too_many_bytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.jpg"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(BadImage, match="1,099,511,627,776 bytes"):
        decode(path)


def test_a_stream_of_too_many_bytes_is_not_read_to_its_end() -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return b"\0" * size

    with pytest.raises(BadImage, match="bytes"):
        decode(Endless(), max_pixels=1000)  # type: ignore[arg-type]


def test_a_file_that_is_gone_is_bad(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="No such file"):
        decode(tmp_path / "gone.png")


def test_random_damage_is_bad_or_harmless() -> None:
    random = np.random.default_rng(0)
    smooth = np.asarray(Image.fromarray(PIXELS).resize((48, 40)))
    for form in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM"):
        whole = np.frombuffer(encoded(smooth, form), np.uint8)
        for _ in range(40):
            damaged = whole.copy()
            damaged[random.integers(0, len(whole), 4)] = random.integers(0, 256, 4)
            try:
                pixels = decode(damaged.tobytes(), max_pixels=10**6)
            except BadImage:
                continue
            assert pixels.shape[2] == 3


def palette_with_bytes() -> bytes:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    return saved(image, transparency=b"\x00\xff")


def test_pillow_warns_about_none_of_it() -> None:
    # The suite makes errors of warnings; a user would see them printed.
    corrupt = encoded(PIXELS, "TIFF")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for data in (palette_with_bytes(), corrupt[:-20], corrupt, *[data for data, _ in HOSTILE.values()]):
            try:
                decode(data)
            except BadImage:
                continue
    assert caught == []


def test_filters_for_warnings_are_left_as_they_were_by_threads() -> None:
    before = list(warnings.filters)
    data = palette_with_bytes()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: decode(data), range(400)))
    assert list(warnings.filters) == before
    with pytest.warns(UserWarning, match="mine"):
        warnings.warn("mine", UserWarning, stacklevel=1)


def test_filters_that_another_thread_sets_meanwhile_stay_its_own() -> None:
    before = list(warnings.filters)
    data = palette_with_bytes()
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(decode, data) for _ in range(300)]
        while not all(task.done() for task in tasks):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
        for task in tasks:
            task.result()
    decode(data)
    assert list(warnings.filters) == before


def _child(queue: Any) -> None:
    queue.put(decode(encoded(PIXELS)).shape)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_process_forked_while_a_thread_decodes_can_decode() -> None:
    with module._quiet_pillow._lock:
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        with warnings.catch_warnings():
            # Newer Pythons warn of forks with threads, which is what is tested.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = context.Process(target=_child, args=(queue,))
            child.start()
        assert queue.get(timeout=30) == PIXELS.shape
        child.join()


def test_fit_leaves_an_image_of_that_shape_alone() -> None:
    assert fit(PIXELS, (12, 20)) is PIXELS


def test_fit_takes_the_centre() -> None:
    image = np.zeros((10, 30, 3), np.uint8)
    image[:, 10:20] = 255
    np.testing.assert_array_equal(fit(image, (10, 10)), np.full((10, 10, 3), 255, np.uint8))
    np.testing.assert_array_equal(fit(image.transpose(1, 0, 2).copy(), (10, 10)), np.full((10, 10, 3), 255, np.uint8))


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (33, 47), (7, 9)])
@pytest.mark.parametrize("shape", [(8, 8), (5, 11), (64, 32)])
def test_fit_gives_the_shape_asked_for(size: tuple[int, int], shape: tuple[int, int]) -> None:
    image = np.full((*size, 3), 77, np.uint8)
    assert fit(image, shape).shape == (*shape, 3)
    assert (fit(image, shape) == 77).all()


def test_fit_is_resizing_the_shorter_side_and_cropping() -> None:
    image = np.asarray(Image.fromarray(example_images(1, size=(40, 80)).images[0]))
    resized = Image.fromarray(image).resize((40, 20), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(fit(image, (20, 20)), np.asarray(resized)[:, 10:30])
