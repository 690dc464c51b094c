"""Blocks on disk: shared by engines, bounded, and never served torn or altered."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driver import Answer
from kv.at_once import without_threads
from kv.conversations import ask, assert_same_words, engine, hits
from tiny_models import make_model, save, tame
from tokenmill.core.types import ModelLoadError
from tokenmill.engine.build import BuiltEngine
from tokenmill.kv.tiers import disk_tier
from tokenmill.kv.tiers.disk_tier import DiskTier
from tokenmill.sched.cache.tiers import WINDOW, block_name, hash_of, is_full

ROOT = bytes(16)
BLOCK = 4096  # bytes of a block of the tiny model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tame(make_model("llama"), 0.3), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Answer]:
    return one_by_one(engine(folder, num_blocks=400))


def with_disk(folder: Path, tiers: str) -> BuiltEngine:
    built = engine(folder, tiers)
    without_threads(built.engine.tiers)
    return built


def one_by_one(built: BuiltEngine) -> list[Answer]:
    """Eight prompts of nine blocks; the device has room for two of them, and host memory, too."""
    source = random.Random(7)
    texts = [[source.randrange(3, 60) for _ in range(144)] for _ in range(8)]
    return [ask(built, [(text, "")], str(i))[0] for i, text in enumerate(texts)]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "usage"]


def usage(folder: Path) -> int:
    return int.from_bytes((folder / "tokenmill-kv" / "usage").read_bytes(), "little")


def failing(code: int) -> Callable[..., None]:
    def call(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return call


def name(number: int) -> bytes:
    return block_name(number.to_bytes(16, "big"), number)


def page(number: int, size: int = 1000) -> list[np.ndarray]:
    return [np.full(size, number % 256, np.uint8)]


def test_engines_share_a_folder(folder: Path, expected: list[Answer], tmp_path: Path) -> None:
    tiers = f"host={24 * BLOCK},disk={tmp_path / 'kv'}:64MiB"
    first = with_disk(folder, tiers)
    assert_same_words(one_by_one(first), expected)
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    second = with_disk(copy, tiers)  # of another path, and of another time
    assert first.engine.stats().tiers["dropped"] == 0
    assert_same_words(one_by_one(first), expected)
    assert hits(first, "disk") > 0
    found = one_by_one(second)
    assert_same_words(found, expected)
    assert found[0].num_cached_tokens == 128, "the second engine computed what the first had"
    other = save(tame(make_model("llama"), 0.2), tmp_path / "other")
    for file in folder.iterdir():  # of the same path, sizes and times
        time = file.stat().st_mtime_ns
        copied = shutil.copyfile(other / file.name, copy / file.name)
        os.utime(copied, ns=(time, time))
    assert one_by_one(with_disk(copy, tiers))[0].num_cached_tokens == 0, "two models share a block"


def test_torn_altered_and_lost_files(folder: Path, expected: list[Answer], tmp_path: Path) -> None:
    tiers = f"host={24 * BLOCK},disk={tmp_path / 'kv'}:64MiB"
    one_by_one(with_disk(folder, tiers))
    found = files(tmp_path / "kv")
    assert len(found) > 20
    for index, path in enumerate(found):
        data = bytearray(path.read_bytes())
        if index % 2:
            path.write_bytes(data[: len(data) // 2])
        else:
            data[-7] ^= 1
            path.write_bytes(data)
    second, third = with_disk(folder, tiers), with_disk(folder, tiers)
    assert_same_words(one_by_one(second), expected)
    assert second.engine.stats().tiers["disk_corrupt"] > 0
    for path in files(tmp_path / "kv"):
        path.unlink()
    assert_same_words(one_by_one(third), expected)
    assert hits(third, "disk") == 0


def test_a_full_disk_stops_the_growth(
    folder: Path,
    expected: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    built = with_disk(folder, f"host={2 * BLOCK},disk={tmp_path}:64MiB")
    monkeypatch.setattr(Path, "rename", failing(errno.ENOSPC))
    with caplog.at_level(logging.WARNING):
        assert_same_words(one_by_one(built), expected)
    built.engine.tiers.close()
    assert not files(tmp_path)
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 1


def test_the_folder_stays_within_its_bound(tmp_path: Path) -> None:
    one, other = (DiskTier(str(tmp_path), 20_000, ROOT) for _ in range(2))
    for number in range(60):
        tier = (one, other)[number % 2]
        assert tier.write(name(number), page(number))
        total = sum(path.stat().st_size for path in files(tmp_path))
        assert total <= 20_000
        assert usage(tmp_path) == total
    assert total > 15_000
    out = page(0)
    assert other.read(name(59), out) and out[0][0] == 59
    assert name(59) in one, "one worker does not see what another has written"
    assert not one.read(name(0), out) and name(0) not in other
    assert not one.write(name(99), page(1, 30_000))


def test_a_crash_leaves_nothing_that_is_served(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), 20_000, ROOT)
    assert tier.write(name(1), page(1)) and tier.write(name(1), page(1))
    path = files(tmp_path)[0]
    left = path.with_name(f".{path.name}.1.1")
    shutil.copy(path, left)
    os.utime(left, (0, 0))
    path.write_bytes(path.read_bytes() + b"x")
    (tmp_path / "tokenmill-kv" / "usage").write_bytes(b"abc")
    again = DiskTier(str(tmp_path), 20_000, ROOT)
    assert not left.exists() and again.names() == [name(1)]
    assert not again.read(name(1), page(0)) and not path.exists()
    assert usage(tmp_path) == 0
    path.mkdir()  # there is something that cannot be read
    assert name(1) in tier and not tier.read(name(1), page(0))
    tier.forget(name(1))
    assert name(1) not in tier, "a request would wait for it again and again"


WORKER = """
import os, signal, sys
import numpy as np
from tokenmill.kv.tiers import disk_tier
from tokenmill.sched.cache.tiers import block_name

folder, first, dies = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "dies"
tier = disk_tier.DiskTier(folder, 50_000, bytes(16))
for number in range(first, first + 40):
    page = [np.full(1000, number % 256, np.uint8)]
    if dies and number == first + 20:  # in the middle of a file
        disk_tier._checksum = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    assert tier.write(block_name(number.to_bytes(16, "big"), number), page)
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Two write at once and one of them is killed: the bound holds, and what is there is whole.

    Three quarters of their blocks fit, so some of both are left whoever comes first.
    """
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), *rest])
        for rest in (("0", "lives"), ("100", "dies"))
    ]
    assert [worker.wait(60) for worker in workers] == [0, -signal.SIGKILL]
    found = files(tmp_path)
    torn = [path for path in found if path.name.startswith(".")]
    total = sum(path.stat().st_size for path in found)
    assert len(torn) == 1 and usage(tmp_path) == total <= 50_000
    third = DiskTier(str(tmp_path), 50_000, ROOT)
    assert len(third) == len(found) - 1
    out = page(0)
    for held in third.names():
        number = hash_of(held)
        assert number < 40 or 100 <= number < 120, "a block that was never whole is served"
        assert third.read(held, out) and (out[0] == number % 256).all()
    assert {hash_of(held) < 100 for held in third.names()} == {True, False}
    for number in range(200, 240):  # the rest of a file counts until it is old
        assert third.write(name(number), page(number))
    assert usage(tmp_path) == sum(path.stat().st_size for path in files(tmp_path)) <= 50_000


def test_the_rate_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(str(tmp_path), 20_000, ROOT)
    rate = tier.measure_rate(2**20)
    assert rate is not None and rate > 0 and not files(tmp_path)
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    assert tier.measure_rate(2**20) is None and not files(tmp_path)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match=r"disk=.*file/kv: Not a directory"):
        DiskTier(str(tmp_path / "file" / "kv"), 1000, ROOT)
    with pytest.raises(ModelLoadError, match=r"are asked for, but only .* are free"):
        DiskTier(str(tmp_path), 2**62, ROOT)


def test_the_files_are_for_their_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "kv" / "tokenmill-kv"
    umask = os.umask(0)
    try:
        top.mkdir(parents=True, mode=0o777)  # by an earlier version
        tier = DiskTier(str(tmp_path / "kv"), 20_000, ROOT)
        assert tier.write(name(1), page(1))
    finally:
        os.umask(umask)
    modes = {path: path.stat().st_mode & 0o777 for path in (top, *top.rglob("*"))}
    assert len(modes) == 5 and {(path.is_dir(), mode) for path, mode in modes.items()} == {
        (True, 0o700),
        (False, 0o600),
    }
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "tokenmill-kv").symlink_to(top)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ModelLoadError, match="is a link, or belongs to another user"):
        DiskTier(str(tmp_path / "linked"), 20_000, ROOT)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ModelLoadError, match="is a link, or belongs to another user"):
        DiskTier(str(tmp_path / "kv"), 20_000, ROOT)


def test_a_lock_that_stays_held_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(str(tmp_path), 20_000, ROOT)
    assert tier.write(name(1), page(1))
    monkeypatch.setattr(disk_tier, "_LOCK_S", 0.05)
    with (tmp_path / "tokenmill-kv" / "usage").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not tier.write(name(2), page(2)), "it was written without the lock"
        assert tier._paused_until, "each block would wait for the lock"
        assert tier.read(name(1), page(1)), "a block that is there needs no lock"
        with pytest.raises(ModelLoadError, match=r"another process held the lock for 0\.05 s"):
            DiskTier(str(tmp_path), 20_000, ROOT)
    assert "another process held the lock" in caplog.text
    tier._paused_until = 0.0
    assert tier.write(name(2), page(2))


def test_files_of_others_stay(tmp_path: Path) -> None:
    """A folder with files of its own may be given: old or new, hidden or not, at any depth."""
    hexadecimal = name(1).hex()
    inside = Path("tokenmill-kv", ROOT.hex())
    foreign = [
        tmp_path / path
        for path in (
            "a/b/.hidden", "a/b/notes.txt", f"{ROOT.hex()}/ab/{hexadecimal}", inside / "notes",
            inside / "ab" / ".hidden", inside / "ab" / "notes.txt", inside / "ab" / "abab",
            inside / "ab" / f".{hexadecimal}.swp", inside / "ab" / "cd" / hexadecimal,
            Path("tokenmill-kv", "photos", "ab", hexadecimal),
        )
    ]  # fmt: skip
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(3000))
        os.utime(path, (0, 0))
    (tmp_path / "lost+found").mkdir(mode=0o000)  # the root of a file system has it
    (tmp_path / inside / "cd").symlink_to(tmp_path / ROOT.hex() / "ab")
    for _ in range(2):
        tier = DiskTier(str(tmp_path), 5000, ROOT)
        for number in range(10):
            assert tier.write(name(number), page(number))
    assert usage(tmp_path) <= 5000
    assert all(path.stat().st_size == 3000 for path in foreign)


def test_the_bound_holds_where_files_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(str(tmp_path), 5000, ROOT)
    for number in range(4):
        assert tier.write(name(number), page(number))
    monkeypatch.setattr(Path, "unlink", failing(errno.EACCES))
    for number in range(4, 12):
        tier._paused_until = 0.0
        assert not tier.write(name(number), page(number))
        assert usage(tmp_path) == sum(path.stat().st_size for path in files(tmp_path)) <= 5000
    assert sorted(tier.names()) == [name(number) for number in range(4)]


def test_bytes_on_their_way_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one worker writes, another removes the oldest files: but not those, nor their count."""
    one, other = (DiskTier(str(tmp_path), 5000, ROOT) for _ in range(2))
    checksum, written = disk_tier._checksum, []

    def slow(*args: Any) -> int:  # it is called when a file has its size, and is not yet written
        monkeypatch.undo()
        written.extend(other.write(name(10 + number), page(number)) for number in range(8))
        return checksum(*args)

    monkeypatch.setattr(disk_tier, "_checksum", slow)
    assert one.write(name(1), page(1)) and written == [True] * 8
    total = sum(path.stat().st_size for path in files(tmp_path))
    assert usage(tmp_path) == total <= 5000 and other.read(name(1), page(0))


def test_a_disk_that_fails_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(str(tmp_path), 5000, ROOT)
    monkeypatch.setattr(os, "stat", failing(errno.EIO))
    assert name(1) not in tier and not tier.write(name(1), page(1))
    assert not tier.read(name(1), page(1))


def test_a_lost_block_is_found_again(tmp_path: Path) -> None:
    one, other = (DiskTier(str(tmp_path), 5000, ROOT) for _ in range(2))
    assert not one.read(name(1), page(1))
    one.forget(name(1))
    assert other.write(name(1), page(1)) and name(1) not in one
    assert one.write(name(1), page(1)) and name(1) in one


def test_routers_hear_of_own_blocks_only(tmp_path: Path) -> None:
    one, other = (DiskTier(str(tmp_path), 5000, bytes([n] * 16)) for n in range(2))
    assert other.write(name(0), page(0))
    for number in range(1, 9):
        assert one.write(name(number), page(number))
    assert (name(0), False) not in one.changes and (name(1), False) in one.changes


@pytest.mark.parametrize(("owner", "step"), [(DiskTier, "_finish"), (os.path, "exists")])
def test_routers_hear_last_that_a_block_has_gone(
    owner: Any, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer removes a block as soon as it has its name, or was found."""
    tier, whole = DiskTier(str(tmp_path), 5000, ROOT), getattr(owner, step)
    if step == "exists":
        assert DiskTier(str(tmp_path), 5000, ROOT).write(name(1), page(1))

    def overtaken(*args: Any) -> Any:
        monkeypatch.undo()
        found = whole(*args)
        for number in range(2, 10):
            assert tier.write(name(number), page(number))
        return found

    monkeypatch.setattr(owner, step, overtaken)
    tier.write(name(1), page(1))
    told = {told for told, here in dict(tier.changes).items() if here}
    assert told == set(tier.names()) == {bytes.fromhex(path.name) for path in files(tmp_path)}


def test_names() -> None:
    assert hash_of(name(7)) == 7 == hash_of(name(7) + WINDOW)
    assert is_full(name(7)) and not is_full(name(7) + WINDOW)
