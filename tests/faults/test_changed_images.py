"""Resuming on images that are no longer those of the run: seen in every file, named, refused; or carried over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from siammm.data.inventory import Inventory
from siammm.data.sources import open_source
from siammm.learn import checkpoint
from siammm.runs.run import Run
from tests.data.image_sets import encoded, example_images, write_folder, write_npz
from tests.faults import runs
from tests.faults.conftest import Commands
from tests.nursery import Nursery

pytestmark = pytest.mark.usefixtures("one_thread")


def files() -> list[Path]:
    return sorted(Path("images").rglob("*.png"))


def outside_the_sample(count: int) -> list[Path]:
    """Images whose contents the fingerprint does not cover."""
    covered = set(open_source("images").spread(256).tolist())
    return [path for i, path in enumerate(files()) if i not in covered][:count]


def overwrite(path: Path, *, seed: int = 9) -> None:
    path.write_bytes(encoded(example_images(1, size=(8, 8), seed=seed).images[0]))


def contents_of_last(path: Path) -> bytes | None:
    """The last checkpoint; for a moment, while another takes its place, there is none."""
    try:
        return (path / "checkpoints" / "last.safetensors").read_bytes()
    except FileNotFoundError:
        return None


def resume(path: Path, *flags: str) -> list[str]:
    return ["train", "images", "--resume", str(path), *runs.little_more(path), *flags]


def test_changed_files_are_named_and_refused(stopped: Path, command: Commands) -> None:
    changed = outside_the_sample(4)
    before = open_source("images").fingerprint()
    for path in changed:
        overwrite(path)
    assert open_source("images").fingerprint() == before  # which is why it is not enough
    contents = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    error = command.refused(*resume(stopped))
    named = ", ".join(str(path.relative_to("images")) for path in changed[:3])
    assert f"images does not contain the images that run was trained on: 4 changed ({named}, ...);" in error
    assert "--allow-data-change" in error
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == contents


def test_a_changed_file_of_the_same_size_is_seen(stopped: Path, command: Commands) -> None:
    path = outside_the_sample(1)[0]
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert f"1 changed ({path.relative_to('images')})" in command.refused(*resume(stopped))


def test_added_and_missing_files_are_named(stopped: Path, command: Commands) -> None:
    shutil.copy2(files()[0], "images/class001/zz.png")
    files()[7].unlink()
    error = command.refused(*resume(stopped))
    assert "1 added (class001/zz.png), 1 missing (class000/00007.png)" in error


def test_other_times_are_not_other_images(stopped: Path, command: Commands) -> None:
    """As after a copy that does not keep them: contents are compared, and the new times kept for the next look."""
    for path in files():
        os.utime(path, (time.time(), time.time()))
    assert "changed" not in command.done(*resume(stopped)).replace("Changed: --epochs", "")
    kept, now = Inventory.read(stopped / "inventory.parquet"), Inventory.of(open_source("images"))
    assert now is not None
    np.testing.assert_array_equal(kept.modified_N, now.modified_N)
    assert (kept.digest_N > 0).all()


def test_a_run_goes_on_with_changed_images(stopped: Path, command: Commands) -> None:
    """Clusters are those of before: an image that kept its name keeps its place in the bank."""
    tensors, facts, *_ = checkpoint.load(stopped / "checkpoints")
    overwrite(files()[3])
    files()[40].unlink()
    for number in range(5):
        overwrite(Path("images/class002") / f"new{number}.png", seed=number)
    printed = command.done(*resume(stopped, "--allow-data-change", "--save-every", "0"))
    assert "1 changed (class000/00003.png), 5 added (class002/new0.png" in printed
    assert "carried over by name" in printed
    run = Run.open(stopped)
    assert len(run.ids) == run.facts["n_images"] == 304
    assert run.facts["changes"][-1]["images"] == {"changed": 1, "added": 5, "missing": 1}
    assert run.fingerprint == open_source("images").fingerprint()
    assert "class000/00040.png" not in run.ids
    assert run.config.clustering.n_components == 10
    assert len(run.metrics) == facts["epoch"] + 1
    assert len(tensors["bank/1"]) == 300
    # From here on these are its images.
    command.done("train", "images", "--resume", "run", "--epochs", str(len(run.metrics) + 1))


def test_what_is_carried_over(nursery: Nursery, stopped: Path) -> None:
    """By hand: the rows of the bank that the checkpoint has after the first look."""
    before, *_ = checkpoint.load(stopped / "checkpoints")
    names = json.loads(before["ids"].numpy().tobytes())
    files()[0].unlink()
    overwrite(Path("images/class000/0.png"))
    overwrite(Path("images/class003/zz.png"))
    saved = contents_of_last(stopped)
    flags = ["train", "images", "--resume", "run", "--allow-data-change", *runs.LONG]
    with runs.living(nursery, *flags, until=stopped / ".lock") as process:
        deadline = time.monotonic() + 60
        while contents_of_last(stopped) in (saved, None) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()  # before the first epoch is over, which is long after the first look
    after, facts, *_ = checkpoint.load(stopped / "checkpoints")
    now = json.loads(after["ids"].numpy().tobytes())
    assert set(names) - set(now) == {"class000/00000.png"}
    assert set(now) - set(names) == {"class000/0.png", "class003/zz.png"}
    assert facts["step_in_epoch"] == 0
    for name in now:
        row = after["bank/1"][now.index(name)]
        if name in names:
            assert row.equal(before["bank/1"][names.index(name)]), name
        else:
            assert float(row.norm()) == pytest.approx(1, abs=1e-3)


def test_a_set_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Commands) -> None:
    monkeypatch.chdir(tmp_path)
    images = example_images(300, size=(8, 8), n_classes=4)
    write_npz(Path(), images)
    command.done("train", "images.npz", *runs.SETTINGS, "--output", "run")
    Path("images.npz").rename("moved.npz")
    command.done("train", "moved.npz", "--resume", "run", "--epochs", "3")
    images.images[int(np.setdiff1d(np.arange(300), open_source("moved.npz").spread(256))[0])] += 1
    write_npz(Path(), images)
    assert "trained on: 1 changed; restore" in command.refused(
        "train", "images.npz", "--resume", "run", "--epochs", "4"
    )
    command.done("train", "images.npz", "--resume", "run", "--epochs", "4", "--allow-data-change")


def test_a_run_of_an_earlier_version_goes_by_its_fingerprint(stopped: Path, command: Commands) -> None:
    (stopped / "inventory.parquet").unlink()
    files()[0].rename("moved.png")
    assert "does not contain the images" in command.refused(*resume(stopped))
    Path("moved.png").rename("images/class000/00000.png")
    command.done(*resume(stopped))
    assert not (stopped / "inventory.parquet").exists()


def test_images_that_only_the_fingerprint_tells_apart(stopped: Path, command: Commands) -> None:
    """A file with other contents, but the size and the time of before: no look at sizes and times sees that."""
    path = files()[0]
    assert 0 in open_source("images").spread(256)
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    error = command.refused(*resume(stopped))
    assert "images does not contain the images that run was trained on; restore them" in error
    printed = command.done(*resume(stopped, "--allow-data-change"))
    assert "The images have changed (others than before)" in printed
    assert Run.open(stopped).fingerprint == open_source("images").fingerprint()
    command.done("train", "images", "--resume", "run", "--epochs", str(len(Run.open(stopped).metrics) + 1))


def test_files_that_could_not_be_read_then_nor_now(nursery: Nursery, tmp_path: Path, command: Commands) -> None:
    """Their digests are not known, and nothing is to be said of them: they were set aside, and still are."""
    images = runs.new_images(tmp_path)
    (images / "class000" / "gone.png").symlink_to("nowhere.png")
    (images / "class001" / "spoilt.png").write_bytes(b"no image")
    arguments = ["train", str(images), *runs.SETTINGS, *runs.LONG, "--output", str(tmp_path / "run")]
    with runs.living(nursery, *arguments, until=tmp_path / "run" / "metrics.jsonl", cwd=tmp_path) as process:
        process.signal(signal.SIGTERM)
        assert process.wait() == 143
    assert len(json.loads((tmp_path / "run" / "set_aside.json").read_text())["set_aside"]) == 2
    for path in (images / "class001").iterdir():
        os.utime(path, (1e9, 1e9))
    go_on = ["train", images, "--resume", tmp_path / "run", *runs.little_more(tmp_path / "run")]
    assert "changed" not in command.done(*go_on).replace("Changed: --epochs", "")
    (images / "class001" / "spoilt.png").write_bytes(b"other image")  # of another size
    assert "1 changed (class001/spoilt.png)" in command.refused(
        *go_on[:-1], str(len(runs.metrics(tmp_path / "run")) + 1)
    )


def test_the_fingerprint_of_files_that_cannot_be_read(tmp_path: Path) -> None:
    """It does not depend on why, which is another on each machine; and it is not that of the same files when whole."""
    images = runs.new_images(tmp_path)
    path = sorted(images.rglob("*.png"))[0]
    whole, content = open_source(images).fingerprint(), path.read_bytes()
    path.unlink()
    path.symlink_to("nowhere.png")
    to_nothing = open_source(images).fingerprint()
    path.unlink()
    path.symlink_to(path.name)
    assert open_source(images).fingerprint() == to_nothing != whole
    path.unlink()
    path.write_bytes(content)
    assert open_source(images).fingerprint() == whole


def test_copies_of_large_images_are_made_anew_if_a_file_has_changed(tmp_path: Path, command: Commands) -> None:
    """Also of a file that the fingerprint does not cover: the copies are named after all files."""
    images = write_folder(tmp_path, example_images(300, size=(40, 40), n_classes=4))
    settings = [*runs.SETTINGS, "--epochs", "1", "--image-size", "8", "--loader", "streaming", "--workers", "0"]
    arguments = ["train", images, *settings, "--image-cache", tmp_path / "cache", "--overwrite"]
    command.done(*arguments, "--output", tmp_path / "run")
    (first,) = (tmp_path / "cache").iterdir()
    covered = set(open_source(images).spread(256).tolist())
    number = next(i for i in range(300) if i not in covered)
    path = sorted(images.rglob("*.png"))[number]
    path.write_bytes(encoded(example_images(1, size=(40, 40), seed=9).images[0]))
    command.done(*arguments, "--output", tmp_path / "run")
    (second,) = {*(tmp_path / "cache").iterdir()} - {first}
    name = f"{number // 1000}/{number}.jpg"
    assert (first / name).read_bytes() != (second / name).read_bytes()
    command.done(*arguments, "--output", tmp_path / "run")
    assert {*(tmp_path / "cache").iterdir()} == {first, second}


def test_a_look_at_many_files_is_quick(tmp_path: Path) -> None:
    """A hundred thousand take 50 times as long as these."""
    for i in range(2000):
        (tmp_path / f"{i}.png").write_bytes(b"x")
    source = open_source(tmp_path)
    seconds: list[float] = []
    for _ in range(3):  # the best of these: a busy machine makes even the time of the CPU longer
        start = time.process_time()
        found = Inventory.of(source)
        assert found is not None
        found.write(tmp_path / "inventory.parquet")
        again = Inventory.of(source)
        assert again is not None
        assert not Inventory.read(tmp_path / "inventory.parquet").compared(again, source).any()
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.4
    assert pq.read_metadata(tmp_path / "inventory.parquet").num_rows == 2000
