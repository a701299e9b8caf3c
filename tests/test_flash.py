"""The store on flash, against what each page must hold: its bytes are a function of all tokens that lead to it, so
whatever breaks, what is read is right or a miss. Faults are injected at every call, in every byte and at every moment.
"""

import errno
import gc
import hashlib
import itertools
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memory import flash
from memory.flash import FlashStore, StoreRefused, clear, inspect

ROOT = Path(__file__).resolve().parents[1]
PAGE, KEY, BLOCK = 64, 8, 4096
HEAD = 50 + KEY  # bytes of a slot before its page
SPACE = bytes(range(32))


def capacity(slots, block=BLOCK, page=PAGE):
    return block + slots * -(-(HEAD + page) // block) * block


def text(*pages):
    """A key of full pages, each named by a number."""
    return b"".join(struct.pack("<II", page, 7) for page in pages)


def page_of(key, space=SPACE):
    """What is stored of a key's last page."""
    return hashlib.sha512(space + key).digest()


def make(path, slots=100, *, fingerprint=b"model", persist=True, page=PAGE, block=BLOCK):
    return FlashStore(path, fingerprint, page, KEY, capacity(slots, block, page), persist)


def write(store, key, space=SPACE, lossy=False):
    """As a caller does: all pages that are not there yet."""
    for page in range(len(store.match(space, key)), len(key) // KEY):
        store.write(space, key, page, page_of(key[: (page + 1) * KEY], space), lossy)


def read(store, key, space=SPACE):
    """Pages of the key that are found and right. Fails on a wrong one; what is lost is a miss."""
    right = 0
    for page, number in enumerate(store.match(space, key)):
        found = store.read(number)
        if found is None:
            break
        assert found[0] == page_of(key[: (page + 1) * KEY], space), "a wrong page"
        right += 1
    return right


def check(store, slots):
    """Each slot is free or has one record, but the one whose write failed; all that the index finds are records."""
    store.flush()
    places = [record.slot for record in store._records.values()] + store._free
    assert len(set(places)) == len(places) == slots - store._off and set(places) <= set(range(slots))
    for (parent, tokens), record in store._index.items():
        assert store._records[record.id] is record and (record.parent, record.tokens) == (parent, tokens)


def files(path):
    return sorted(path.glob("*.kv"))


class Unsynced:
    """`os` that waits for no disk; the processes of their own below do."""

    fsync = staticmethod(lambda fd: None)

    def __getattr__(self, name):
        return getattr(os, name)


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    monkeypatch.setattr(flash, "os", Unsynced())


# What it stores.


def test_sealed_pages_are_read_by_their_process_alone(tmp_path):
    """Nothing of them is in the file; it is gone afterwards, and what a killed process left with the next store."""
    key = text(*range(40))
    store = FlashStore(tmp_path, b"model", PAGE, KEY, capacity(100), False, seal=True)
    write(store, key)
    store.flush()
    assert (
        read(store, key) == 40 and store.stats()["corrupt"] == 0 and not any(r.image for r in store._records.values())
    )
    (file,) = files(tmp_path)
    image = file.read_bytes()
    for page in range(40):
        part = key[: (page + 1) * KEY]
        assert page_of(part)[:12] not in image and struct.pack("<II", page, 7) not in image
    counts = [image[BLOCK:].count(value) for value in range(256)]
    mean = (len(image) - BLOCK) / 256
    assert max(abs(count - mean) for count in counts) < 7 * mean**0.5  # as evenly as random bytes
    (row,) = inspect(tmp_path)
    assert (row["version"], row["records"], row["damaged"]) == (257, 0, 0)
    store.close()
    assert files(tmp_path) == []
    for seal in (False, True):
        file.write_bytes(image)
        store = FlashStore(tmp_path, b"model", PAGE, KEY, capacity(100), False, seal=seal)
        assert file not in files(tmp_path) and read(store, key) == 0
        store.close()


def test_damage_of_sealed_slots_is_a_miss(tmp_path):
    key = text(1, 2, 3)
    for at in (0, 11, 12, 40, 2000, BLOCK - 17, BLOCK - 1, None):
        store = FlashStore(tmp_path, b"model", PAGE, KEY, capacity(10), False, seal=True)
        write(store, key)
        store.flush()
        (file,) = files(tmp_path)
        with file.open("r+b") as handle:
            if at is None:
                handle.truncate(3 * BLOCK + 5)
            else:
                handle.seek(2 * BLOCK + at)
                byte = handle.read(1)[0]
                handle.seek(2 * BLOCK + at)
                handle.write(bytes([byte ^ 16]))
        assert read(store, key) == (1 if at is not None else 2), at
        assert store.stats()["corrupt"] == 1
        store.close()


def test_what_is_written_is_read_at_once_after_a_flush_and_by_the_next_process(tmp_path):
    key = text(1, 2, 3)
    store = make(tmp_path / "d")
    assert store.match(SPACE, key) == []
    write(store, key)
    assert read(store, key) == 3
    store.flush()
    assert read(store, key) == 3 and read(store, text(1, 2)) == 2 and read(store, text(1, 4, 3)) == 1
    assert read(store, key + b"half") == 3 and read(store, key[:-1]) == 2
    store.close()
    store = make(tmp_path / "d")
    assert read(store, key) == 3
    write(store, text(1, 2, 5))
    assert read(store, text(1, 2, 5)) == 3
    store.flush()
    assert store.stats() | {"read_seconds": 0} == {
        "hits": 6, "misses": 0, "corrupt": 0, "writes": 1, "write_errors": 0, "read_seconds": 0, "records": 4,
        "flash_bytes": 4 * BLOCK, "read_bytes": 6 * PAGE, "switched_off": False,
    }  # fmt: skip
    assert store.stats()["read_seconds"] > 0
    store.close()
    assert store.match(SPACE, key) == [] and store.read(1) is None
    store.close()


def test_equal_pages_behind_different_beginnings_are_different_pages(tmp_path):
    """Also of two namespaces, and where a page follows itself."""
    store = make(tmp_path)
    keys = [text(1, 9), text(2, 9), text(9), text(9, 9), text(9, 9, 9), text(1, 2, 9)]
    for space in (SPACE, bytes(32)):
        for key in keys:
            write(store, key, space)
    for _ in range(2):
        for space in (SPACE, bytes(32)):
            assert [read(store, key, space) for key in keys] == [2, 2, 1, 2, 3, 3]
        assert read(store, text(1, 9), bytes(31) + b"\1") == 0
        store.close()
        store = make(tmp_path)
    store.close()


def test_no_namespace_is_taken_for_an_id(tmp_path):
    """One that reads like the id of a page, as a number."""
    store = make(tmp_path)
    write(store, text(1))
    (number,) = store.match(SPACE, text(1))
    write(store, text(2), number.to_bytes(32, "little"))
    assert read(store, text(1, 2)) == 1
    store.close()
    store = make(tmp_path)
    assert read(store, text(1, 2)) == 1 and read(store, text(2), number.to_bytes(32, "little")) == 1
    store.close()


def test_a_page_says_whether_it_is_lossy(tmp_path):
    store = make(tmp_path)
    write(store, text(1))
    write(store, text(1, 2), lossy=True)
    for _ in range(2):
        assert [store.read(number)[1] for number in store.match(SPACE, text(1, 2))] == [False, True]
        store.close()
        store = make(tmp_path)
    store.close()


def test_an_exact_page_takes_the_place_of_a_lossy_one(tmp_path, gate):
    """Also while that one waits to be written, or is; never the other way round. What follows stays where it is."""
    key = text(1, 2, 3)
    for moment in ("stored", "waiting", "written"):
        store = make(tmp_path / moment, slots=4)  # the new one has a place before the old one loses its
        if moment != "stored":
            gate.may.clear()
        for page in range(3):
            other = bytes(reversed(page_of(key[: (page + 1) * KEY])))
            assert store.write(SPACE, key, page, other if page == 1 else page_of(key[: (page + 1) * KEY]), page == 1)
        assert len(store.match(SPACE, key)) == 3 and len(store.match(SPACE, key, exact=True)) == 1
        if moment == "stored":
            store.flush()
        elif moment == "written":
            time.sleep(0.05)  # the writer is in the first one by now
        (number,) = store.match(SPACE, key)[1:2]
        assert store.write(SPACE, key, 1, page_of(key[: 2 * KEY]), False)
        assert store.match(SPACE, key)[1] == number and (moment == "stored" or store.read(number)[1])
        gate.may.set()
        store.flush()
        for lossy in (False, True):  # is there: nothing happens
            writes = gate.writes
            assert store.write(SPACE, key, 1, b"x" * PAGE, lossy)
            store.flush()
            assert gate.writes == writes
        for _ in range(2):
            assert read(store, key) == 3 and len(store.match(SPACE, key, exact=True)) == 3
            check(store, 4)
            store.close()
            store = make(tmp_path / moment, slots=4)
        store.close()


def test_a_lossy_page_stays_where_the_exact_one_cannot_be_written(tmp_path, monkeypatch, caplog):
    store = make(tmp_path)
    for page in range(4):
        store.write(SPACE, text(1, 2, 3, 4), page, page_of(text(1, 2, 3, 4)[: (page + 1) * KEY]), page > 0)
    store.flush()

    def full(*args):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(flash.os, "pwrite", full, raising=False)
    assert store.write(SPACE, text(1, 2), 1, page_of(text(1, 2)), False)
    store.flush()
    assert read(store, text(1, 2, 3, 4)) == 4 and len(store.match(SPACE, text(1, 2), exact=True)) == 1
    assert "no more is written there" in caplog.text
    store.close()


def test_records_that_go_while_they_are_looked_for(tmp_path, monkeypatch):
    """The writer drops the least recently used between a walk and what asks for its records."""
    store = make(tmp_path, slots=2)
    write(store, text(1))
    write(store, text(2))
    store.flush()
    walk = FlashStore._walk

    def slow(self, namespace, key):
        found = walk(self, namespace, key)
        monkeypatch.setattr(FlashStore, "_walk", walk)
        write(self, text(3))
        self.flush()
        return found

    monkeypatch.setattr(FlashStore, "_walk", slow)
    assert store.match(SPACE, text(1), exact=True) == []
    monkeypatch.setattr(FlashStore, "_walk", slow)
    store.write(SPACE, text(2), 0, page_of(text(2)), False)
    store.flush()
    check(store, 2)
    assert read(store, text(2)) == 1
    store.close()


def test_payloads_of_any_buffer_and_pages_larger_than_a_block(tmp_path):
    store = make(tmp_path, page=5000, slots=20)
    payload = os.urandom(5000)
    store.write(SPACE, text(1), 0, memoryview(bytearray(payload)), False)
    store.write(SPACE, text(2), 0, memoryview(payload).cast("i"), False)
    store.flush()
    for key in (text(1), text(2)):
        view, _ = store.read(*store.match(SPACE, key))
        assert view == payload and view.readonly
    for wrong in (payload[1:], payload + b"x", b""):
        with pytest.raises(AssertionError):
            store.write(SPACE, text(3), 0, wrong, False)
    store.close()


class Gate(Unsynced):
    """`os` whose writes wait until they may."""

    def __init__(self):
        self.may, self.writes = threading.Event(), 0

    def pwrite(self, *args):
        assert self.may.wait(10)
        self.writes += 1
        return os.pwrite(*args)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    gate.may.set()
    monkeypatch.setattr(flash, "os", gate)
    yield gate
    gate.may.set()


def test_writing_returns_at_once_and_what_waits_is_stored_and_read(tmp_path, gate):
    store = make(tmp_path)
    gate.may.clear()
    key = text(1, 2, 3)
    begun = time.perf_counter()
    write(store, key)
    assert len(store.match(SPACE, key)) == 3 and read(store, key) == 3
    assert time.perf_counter() - begun < 5  # the gate holds for ten
    before = gate.writes
    for page in range(3):
        store.write(SPACE, key, page, bytes(PAGE), False)  # is stored already
    gate.may.set()
    store.flush()
    assert gate.writes - before == 3 and read(store, key) == 3
    store.close()


def test_what_is_not_queued(tmp_path, gate, monkeypatch):
    store = make(tmp_path)
    store.write(SPACE, text(1, 2), 1, page_of(text(1, 2)), False)  # its parent is not stored
    assert store.match(SPACE, text(1, 2)) == [] and not store._records
    monkeypatch.setattr(flash, "_QUEUE_BYTES", 2 * BLOCK)
    gate.may.clear()
    write(store, text(1, 2, 3, 4))
    assert len(store.match(SPACE, text(1, 2, 3, 4))) == 2  # the others do not fit the queue
    gate.may.set()
    store.flush()
    write(store, text(1, 2, 3, 4))
    assert len(store.match(SPACE, text(1, 2, 3, 4))) == 4
    monkeypatch.setattr(flash, "_QUEUE_BYTES", 1)
    store.flush()
    write(store, text(5))  # one always may
    store.flush()
    assert store._queued == 0 and read(store, text(5)) == 1
    store.close()


# What goes when there is no place.


def test_the_least_recently_used_goes_first_and_the_end_of_a_text_before_its_beginning(tmp_path):
    store = make(tmp_path, slots=6)
    for key in (text(1, 2, 3), text(4, 5, 6)):
        write(store, key)
    assert read(store, text(1, 2)) == 2  # and not page 3
    write(store, text(7, 8))
    store.flush()
    assert [read(store, key) for key in (text(1, 2, 3), text(4, 5, 6), text(7, 8))] == [2, 2, 2]
    check(store, 6)
    write(store, text(7, 8, 9, 10, 11, 12, 13, 14))  # more than there is: its beginning
    check(store, 6)
    assert read(store, text(7, 8, 9, 10, 11, 12, 13, 14)) == 6
    assert len(store._records) == 6
    store.close()


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_the_capacity_is_kept_and_all_of_it_used(tmp_path, slots):
    for run in range(3):
        store = make(tmp_path, slots=slots)
        assert len(store._records) == (slots if run else 0)
        for number in range(3 * slots):
            write(store, text(1000 * run + number))
            store.flush()
            assert sum(file.stat().st_size for file in files(tmp_path)) <= capacity(slots)
        check(store, slots)
        assert [read(store, text(1000 * run + number)) for number in range(3 * slots)] == [0] * 2 * slots + [1] * slots
        store.close()


def test_a_smaller_capacity_holds_at_once(tmp_path):
    store = make(tmp_path, slots=10)
    write(store, text(*range(10)))
    store.close()
    store = make(tmp_path, slots=4)
    assert files(tmp_path)[0].stat().st_size == capacity(4)
    assert read(store, text(*range(10))) == 4
    check(store, 4)
    store.close()
    store = make(tmp_path, slots=10)
    write(store, text(*range(10)))
    store.flush()
    assert read(store, text(*range(10))) == 10
    store.close()


def test_the_capacity_counts_what_others_left(tmp_path):
    other = make(tmp_path, slots=5, fingerprint=b"other")
    write(other, text(*range(5)))
    other.close()
    left = files(tmp_path)[0].read_bytes()
    store = FlashStore(tmp_path, b"model", PAGE, KEY, capacity(5) + capacity(2), True)
    write(store, text(1, 2, 3))
    store.flush()
    assert read(store, text(1, 2, 3)) == 2
    store.close()
    needed = 2 * BLOCK
    given = capacity(5) + capacity(2) + needed - 1
    with pytest.raises(StoreRefused, match=rf"needs {needed} bytes, and of {given} other models left {needed - 1}:"):
        FlashStore(tmp_path, b"third", PAGE, KEY, given, True)
    assert left in [file.read_bytes() for file in files(tmp_path)] and len(files(tmp_path)) == 2


def test_too_small_a_capacity_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(StoreRefused, match=f"needs {2 * BLOCK} bytes, .* of {2 * BLOCK - 1} .* {2 * BLOCK - 1}:"):
        FlashStore(tmp_path / "d", b"", PAGE, KEY, 2 * BLOCK - 1, False)
    assert not (tmp_path / "d").exists()
    FlashStore(tmp_path / "d", b"", PAGE, KEY, 2 * BLOCK, False).close()


# Whose files.


def test_what_is_stored_belongs_to_one_fingerprint_and_layout(tmp_path):
    write_here = lambda **others: make(tmp_path, **others)  # noqa: E731
    stores = [{"fingerprint": b"a"}, {"fingerprint": b"b"}, {"fingerprint": b"a", "page": PAGE - 1}]
    for others in stores[:2]:
        store = write_here(**others)
        write(store, text(1, 2))
        store.close()
    for others, found in zip(stores, (2, 2, 0), strict=True):
        store = write_here(**others)
        assert len(store.match(SPACE, text(1, 2))) == found
        store.close()
    assert len(files(tmp_path)) == 3


def test_files_of_others_are_left_alone(tmp_path):
    """Of newer versions, of other models, and what looks like ours; also at the end of a store that keeps nothing."""
    newer = struct.pack("<8sI", b"ISOTHERM", 2) + bytes(5000)
    contents = {"0123456789abcdef.kv": newer, "notes.kv": b"mine", "lock": b"1", "fedcba9876543210.kv": b"", "x": b"y"}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    for persist in (True, False):
        store = make(tmp_path, persist=persist)
        write(store, text(1, 2))
        store.close()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == contents
    assert sorted(clear(tmp_path)) == ["0123456789abcdef.kv", "fedcba9876543210.kv"]
    assert {file.name for file in tmp_path.iterdir()} == {"notes.kv", "lock", "x"}


def test_only_the_owner_can_read_what_is_stored(tmp_path):
    old = os.umask(0)
    try:
        store = make(tmp_path / "a" / "b")
        write(store, text(1))
        store.flush()
        assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "a" / "b").iterdir()} == {0o600}
        store.close()
    finally:
        os.umask(old)


def test_directories_that_are_refused(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o770)
    for name, why in (("link", "no link"), ("dangling", "exists"), ("file", "Not a dir"), ("group", "chmod 700"),
                      ("file/below", "Not a dir")):  # fmt: skip
        with pytest.raises(StoreRefused, match=f"{name}.*{why}"):
            make(tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StoreRefused, match="others own it"):
        make(tmp_path / "real")
    assert list((tmp_path / "real").iterdir()) == [] and list((tmp_path / "group").iterdir()) == []


def test_links_and_pipes_in_the_place_of_the_file_are_not_followed(tmp_path):
    store = make(tmp_path / "d")
    (name,) = (file.name for file in files(tmp_path / "d"))
    store.close()
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    for plant in (lambda path: path.symlink_to(target), os.mkfifo, Path.mkdir):
        (tmp_path / "d" / name).unlink()
        plant(tmp_path / "d" / name)
        with pytest.raises(StoreRefused, match=str(tmp_path / "d")):
            make(tmp_path / "d")
        if (tmp_path / "d" / name).is_dir():
            (tmp_path / "d" / name).rmdir()
            (tmp_path / "d" / name).touch()
    (tmp_path / "d" / name).unlink()
    (tmp_path / "d" / "isotherm.lock").symlink_to(target)
    with pytest.raises(StoreRefused):
        make(tmp_path / "d")
    assert target.read_bytes() == b"precious"


def test_one_store_a_directory(tmp_path):
    store = make(tmp_path / "d")
    for use in (lambda: make(tmp_path / "d", fingerprint=b"other"), lambda: clear(tmp_path / "d"),
                lambda: inspect(tmp_path / "d", verify=True)):  # fmt: skip
        with pytest.raises(StoreRefused, match=f"in use by process {os.getpid()};"):
            use()
    write(store, text(1))
    store.flush()
    assert [row["records"] for row in inspect(tmp_path / "d")] == [1]
    store.close()
    make(tmp_path / "d").close()


def test_a_store_that_nobody_closed_ends_with_its_last_reference(tmp_path):
    store = make(tmp_path / "d", persist=False)
    write(store, text(1))
    store.flush()
    del store
    gc.collect()
    assert not (tmp_path / "d").exists()
    make(tmp_path / "d").close()


def test_nothing_stays_unless_it_shall(tmp_path):
    (tmp_path / "had").mkdir(0o700)
    for name in ("made", "had"):
        store = make(tmp_path / name, persist=False)
        write(store, text(1))
        store.close()
    assert not (tmp_path / "made").exists() and list((tmp_path / "had").iterdir()) == []
    store = make(tmp_path / "made", persist=True)
    write(store, text(1))
    store.close()
    assert [file.suffix for file in (tmp_path / "made").iterdir()] == [".kv"]
    make(tmp_path / "made", persist=False).close()
    assert list((tmp_path / "made").iterdir()) == []


@pytest.mark.parametrize("swap", ["removed", "link", "other"])
def test_a_directory_that_goes_while_it_is_used(tmp_path, swap):
    store = make(tmp_path / "d", slots=4, persist=False)
    write(store, text(1, 2))
    store.flush()
    (tmp_path / "elsewhere").mkdir(0o700)
    (tmp_path / "elsewhere" / "isotherm.lock").write_text("theirs")
    if swap == "removed":
        shutil.rmtree(tmp_path / "d")
    else:
        (tmp_path / "d").rename(tmp_path / "gone")
        if swap == "link":
            (tmp_path / "d").symlink_to(tmp_path / "elsewhere")
        else:
            shutil.copytree(tmp_path / "elsewhere", tmp_path / "d")
    write(store, text(3, 4, 5))
    store.flush()
    assert read(store, text(1, 2)) + read(store, text(3, 4, 5)) == 4
    store.close()
    assert [file.read_text() for file in (tmp_path / "elsewhere").iterdir()] == ["theirs"]
    assert swap == "removed" or not files(tmp_path / "gone")


# Faults of the disk.


KINDS = ("open", "pread", "pwrite", "fsync", "ftruncate", "fstat", "unlink", "scandir")
FAULTS = dict.fromkeys(KINDS, ("EIO",)) | {
    "pread": ("EIO", "short", "zeros"),
    "pwrite": ("EIO", "ENOSPC", "short", "lost", "torn"),
    "open": ("EIO", "ENOSPC", "EMFILE"),
}


class Faulty:
    """`os` for the store: counts the calls of each kind, and lets one of them go wrong."""

    def __init__(self, kind=None, number=0, fault=None):
        self.plan, self.calls, self.injected = (kind, number, fault), dict.fromkeys(KINDS, 0), 0

    def __getattr__(self, name):
        real = getattr(Unsynced(), name)
        if name not in KINDS:
            return real

        def call(*args, **options):
            self.calls[name] += 1
            if self.plan[:2] != (name, self.calls[name]):
                return real(*args, **options)
            self.injected += 1
            fault, size = self.plan[2], len(args[1]) if name == "pwrite" else 0
            if fault in ("EIO", "ENOSPC", "EMFILE"):
                raise OSError(getattr(errno, fault), f"injected {fault}")
            if name == "pread":
                data = real(*args, **options)
                return data[: len(data) // 2] if fault == "short" else bytes(len(data))
            if fault != "lost":
                os.pwrite(args[0], bytes(args[1])[: size // 2], args[2])
            return size // 2 if fault == "short" else size

        return call


OLD, NEW, SHARED = text(1, 2), text(3, 4, 5), text(1, 6)


def scenario(path, refused, stored):
    """A store of four slots is filled, read, filled beyond its end, and opened again. Whatever goes wrong, all that is
    read is right; `stored` grows by what was found."""
    for keys in ((OLD,), (NEW, SHARED), (OLD,)):
        try:
            store = make(path, slots=4, block=flash._BLOCK)
        except StoreRefused as error:
            refused.append(str(error))
            continue
        for key in keys:
            write(store, key)
            store.flush()
        stored += [read(store, key) for key in (OLD, NEW, SHARED)]
        stored += [read(store, key) for key in (OLD, NEW, SHARED)]
        check(store, 4)
        store.close()


@pytest.fixture
def small(monkeypatch):
    """Slots of 128 bytes, so that all of them can be broken."""
    monkeypatch.setattr(flash, "_BLOCK", 64)


def test_every_call_failing_once(tmp_path, monkeypatch, small, caplog):
    counting = Faulty()
    monkeypatch.setattr(flash, "os", counting)
    refused, whole = [], []
    scenario(tmp_path / "counted", refused, whole)
    assert not refused and sum(whole) > 20
    plans = [
        (kind, number, fault)
        for kind in KINDS for fault in FAULTS[kind] for number in range(1, counting.calls[kind] + 1)
    ]  # fmt: skip
    injected = 0
    for index, plan in enumerate(plans):
        path, refused, stored = tmp_path / str(index), [], []
        faulty = Faulty(*plan)
        monkeypatch.setattr(flash, "os", faulty)
        caplog.clear()
        scenario(path, refused, stored)
        injected += faulty.injected
        assert faulty.injected == 1, plan
        assert len(refused) <= 1 and all(str(path) in line for line in refused), plan
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == (plan[0] == "pwrite" and plan[2] in ("EIO", "ENOSPC", "short") and not refused
                                 and "no more is written" in " ".join(warnings)), plan  # fmt: skip
        assert all(str(path) in line for line in warnings)
        # No space is lost: what comes then finds all four slots.
        monkeypatch.setattr(flash, "os", Unsynced())
        store = make(path, slots=4, block=64)
        write(store, text(7, 8, 9, 10))
        store.flush()
        assert read(store, text(7, 8, 9, 10)) == 4, plan
        check(store, 4)
        store.close()
    assert injected == len(plans) > 150


def test_a_full_disk_stops_writing_not_reading(tmp_path, monkeypatch, caplog):
    store = make(tmp_path)
    write(store, text(1, 2))
    store.flush()
    monkeypatch.setattr(flash, "os", Faulty("pwrite", 1, "ENOSPC"))
    for number in range(3, 9):
        write(store, text(1, number))
    store.flush()
    assert len(caplog.records) == 1
    assert f"{tmp_path}: [Errno 28] injected ENOSPC: no more is written" in caplog.records[0].getMessage()
    assert read(store, text(1, 2)) == 2 and [read(store, text(1, number)) for number in range(3, 9)] == [1] * 6
    stats = store.stats()
    assert (stats["switched_off"], stats["write_errors"], stats["writes"], stats["records"]) == (True, 1, 2, 2)
    assert store._queued == 0
    store.close()


def test_a_read_that_fails_drops_the_record_and_its_slot_serves_again(tmp_path, monkeypatch):
    store = make(tmp_path, slots=3)
    write(store, text(1, 2, 3))
    store.flush()
    monkeypatch.setattr(flash, "os", Faulty("pread", 1, "EIO"))
    _, second, third = store.match(SPACE, text(1, 2, 3))
    assert store.read(second) is None and store.read(second) is None
    assert (store.stats()["corrupt"], store.stats()["misses"]) == (1, 2)
    assert len(store.match(SPACE, text(1, 2, 3))) == 1
    write(store, text(1, 2, 3))
    store.flush()
    assert read(store, text(1, 2, 3)) == 3 and store.match(SPACE, text(1, 2, 3))[2] != third
    check(store, 3)
    store.close()


def test_every_byte_of_a_store_flipped(tmp_path, small):
    """Each byte in two ways, and in a third one while it is open: the pages are right or missing, and those beside the
    flipped one are there."""
    path = tmp_path / "d"
    keys = [text(1), text(2), text(3)]
    store = make(path, slots=3, block=64)
    for key in keys:
        write(store, key)
    store.close()
    (file,) = files(path)
    data = file.read_bytes()
    assert len(data) == 64 + 3 * 128
    flips = lost = 0
    for position, mask in itertools.product(range(len(data)), (0x01, 0xFF)):
        file.write_bytes(data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :])
        store = make(path, slots=3, block=64)
        right = [read(store, key) for key in keys]
        slot = (position - 64) // 128
        assert right == [int(position >= 64 and number != slot) for number in range(3)], position
        store.close()
        flips, lost = flips + 1, lost + 3 - sum(right)
    assert (flips, lost) == (2 * len(data), 2 * (64 * 3 + 3 * 128))
    file.write_bytes(data)
    store = make(path, slots=3, block=64)  # the same while it is open
    numbers = [store.match(SPACE, key)[0] for key in keys]
    records = dict(store._records), dict(store._index)
    with file.open("r+b", buffering=0) as raw:
        for position in range(len(data)):
            os.pwrite(raw.fileno(), bytes([data[position] ^ 0x10]), position)
            slot = (position - 64) // 128
            for index, number in enumerate(numbers):
                found = store.read(number)
                assert found is None if index == slot else found[0] == page_of(keys[index])
            os.pwrite(raw.fileno(), data[position : position + 1], position)
            store._records, store._index, store._free = dict(records[0]), dict(records[1]), []
    store.close()


def test_a_store_cut_at_any_length(tmp_path, small):
    path = tmp_path / "d"
    store = make(path, slots=3, block=64)
    write(store, text(1, 2, 3))
    store.close()
    (file,) = files(path)
    data = file.read_bytes()
    for length in range(len(data) + 1):
        file.write_bytes(data[:length])
        store = make(path, slots=3, block=64)
        assert read(store, text(1, 2, 3)) == max(length - 64, 0) // 128
        write(store, text(1, 2, 3))
        store.flush()
        assert read(store, text(1, 2, 3)) == 3
        store.close()


def test_slots_in_the_wrong_place_or_of_another_time_are_found_as_what_they_are(tmp_path):
    """Swapped slots are read as the pages they are; a copy of an old slot over a new one, while open, is a miss."""
    store = make(tmp_path, slots=3)
    write(store, text(1, 2, 3))
    store.close()
    (file,) = files(tmp_path)
    data = file.read_bytes()
    slots = [data[BLOCK * place : BLOCK * (place + 1)] for place in range(4)]
    file.write_bytes(slots[0] + slots[3] + slots[1] + slots[2])
    store = make(tmp_path, slots=3)
    assert read(store, text(1, 2, 3)) == 3
    file.write_bytes(data)
    assert store.match(SPACE, text(1, 2, 3)) and read(store, text(1, 2, 3)) == 0
    store.close()


def test_ids_are_not_used_again(tmp_path, monkeypatch):
    """What follows a page that was lost must not be found behind the page that comes in its place, also where the
    clock stands still and the page was the last that could be read."""
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    store = make(tmp_path)
    write(store, text(1, 2, 3))
    store.close()
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    data[2 * BLOCK] ^= 1  # page 2
    file.write_bytes(data)
    store = make(tmp_path)
    assert read(store, text(1, 2, 3)) == 1
    write(store, text(1, 9))
    write(store, text(1, 2))
    store.flush()
    for _ in range(2):
        assert read(store, text(1, 9, 3)) == 2 and read(store, text(1, 2, 3)) == 2
        store.close()
        store = make(tmp_path)
    store.close()


# Crashes, limits and other processes.


def start(code, *args, **options):
    """A process of its own, that has the names of this file."""
    begin = "import sys; sys.path[:0] = sys.argv[1:3]; import oracle.invariants; from test_flash import *\n"
    args = [sys.executable, "-c", begin + textwrap.dedent(code), ROOT, ROOT / "tests", *args]
    return subprocess.Popen(list(map(str, args)), stdout=-1, stderr=-1, stdin=-1, text=True, **options)


def run(code, *args):
    process = start(code, *args)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


CRASHES = """
    import signal
    path, when, full = Path(sys.argv[3]), sys.argv[4], sys.argv[5] == "full"

    class Killing(Faulty):
        "Ends the process before, within, or right after one of its writes."

        def pwrite(self, fd, data, offset):
            self.calls["pwrite"] += 1
            if self.calls["pwrite"] != self.plan[1]:
                return os.pwrite(fd, data, offset)
            os.pwrite(fd, bytes(data)[: {"before": 0, "half": len(data) // 2, "after": len(data)}[when]], offset)
            os.kill(os.getpid(), signal.SIGKILL)

    texts = [text(number, number + 1) for number in range(0, 10, 2)]
    prefixes = [key[:end] for key in texts for end in (KEY, 2 * KEY)]  # in the order of their writes
    slots = 4 if full else 10
    died, slowest = 0, 0.0
    for number in range(1, 13):  # the process's number, the file's header, ten pages
        if not os.fork():
            flash.os = Killing("", number)
            store = make(path / str(number), slots)
            for key in texts:
                write(store, key)
                store.flush()
            os._exit(1)
        died += os.wait()[1] == signal.SIGKILL
        begun = time.perf_counter()
        store = make(path / str(number), slots)
        slowest = max(slowest, time.perf_counter() - begun)
        here = [read(store, key) * KEY == len(key) for key in prefixes]
        count = max(number - 3 + (when == "after"), 0)  # pages that were written as a whole
        if full:
            assert sum(here) >= min(count, slots) - 1, (number, here)  # the page whose place was written over may go
        else:
            assert here == [index < count for index in range(10)], (number, here)
        write(store, text(100, 101, 102, 103))
        check(store, slots)
        assert read(store, text(100, 101, 102, 103)) == 4
        assert max(file.stat().st_size for file in files(path / str(number))) <= capacity(slots)
        store.close()
    print(died, slowest)
    """


@pytest.mark.parametrize("full", ["full", "empty"])
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_killed_at_every_write(tmp_path, when, full):
    """The next process finds what was written until then, and all the place there is."""
    out, _ = run(CRASHES, tmp_path, when, full)
    died, slowest = out.split()
    assert int(died) == 12 and float(slowest) < 1


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path):
    """The system's own short write, and its EFBIG."""
    out, err = run(
        """
        import resource
        store = make(Path(sys.argv[3]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (capacity(2) + 100, resource.RLIM_INFINITY))
        for number in range(2):
            write(store, text(1, 2, 3, 4))
            store.flush()
        print(read(store, text(1, 2, 3, 4)), store.stats()["switched_off"])
        store.close()
        store = make(Path(sys.argv[3]))
        print(read(store, text(1, 2, 3, 4)))
        """,
        tmp_path / "d",
    )
    assert out.split() == ["2", "True", "2"]
    assert err.count("no more is written") == 1


@pytest.mark.parametrize("persist", [True, False])
def test_a_process_that_ends_without_closing(tmp_path, persist):
    """What is queued is still written, and deleted where it shall not stay."""
    code = "store = make(Path(sys.argv[3]), persist=bool(int(sys.argv[4]))); write(store, text(*range(50)))"
    assert run(code, tmp_path / "d", int(persist)) == ("", "")
    assert (tmp_path / "d").exists() == persist
    if persist:
        assert [file.suffix for file in (tmp_path / "d").iterdir()] == [".kv"]
        store = make(tmp_path / "d")
        assert read(store, text(*range(50))) == 50
        store.close()


def test_what_a_killed_process_left_is_found_and_goes_at_the_end(tmp_path):
    process = start(
        "store = make(Path(sys.argv[3]), persist=False); write(store, text(1, 2)); store.flush()\n"
        "print('written', flush=True); sys.stdin.read()",
        tmp_path / "d",
    )
    assert process.stdout.readline() == "written\n"
    with pytest.raises(StoreRefused, match=f"{tmp_path / 'd'}: in use by process {process.pid}; end it, or"):
        make(tmp_path / "d")
    process.kill()
    process.communicate()
    store = make(tmp_path / "d", persist=False)
    assert read(store, text(1, 2)) == 2
    store.close()
    assert not list((tmp_path / "d").iterdir())


def test_a_thousand_records_are_opened_in_less_than_a_second(tmp_path):
    """Also where they are one text, of which each page leads to the next."""
    for name, pages in (("one", 1000), ("many", 1)):
        store = make(tmp_path / name, slots=1000)
        for number in range(1000 // pages):
            write(store, text(*range(number, number + pages)))
            store.flush()
        store.close()
        begun = time.process_time()  # some hundredths of a second
        store = make(tmp_path / name, slots=1000)
        assert time.process_time() - begun < 1
        assert len(store._records) == 1000
        store.close()


def test_reading_while_pages_are_written_over(tmp_path):
    """Four slots, and texts that fight for them: what is read is right, though its slot may be another's soon."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        store, right = make(tmp_path, slots=4), 0
        for number in range(1500):
            write(store, text(number % 3, number % 7, number % 11))
            right += read(store, text((number + 1) % 3, (number + 1) % 7))
            right += read(store, text(number % 3, number % 7, number % 11))
        check(store, 4)
        assert right > 1000 and store.stats()["corrupt"] == 0
        store.close()
    finally:
        sys.setswitchinterval(old)


# Any order of all that is done with it.


class Store(RuleBasedStateMachine):
    """Against a list of texts in the order in which they go, for which everything is written at once."""

    SLOTS = 5

    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.order, self.time = [], {}  # what is stored, what goes first first; when it was written
        self.store = make(self.path / "d", self.SLOTS)

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.path)

    def use(self, key, space):
        for end in range(len(key), 0, -KEY):
            entry = (space, key[:end])
            if entry in self.order:
                self.order.remove(entry)
            self.order.append(entry)

    keys = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(lambda pages: text(*pages))
    spaces = st.sampled_from([SPACE, bytes(32)])

    @rule(key=keys, space=spaces)
    def write(self, key, space):
        for end in range(KEY, len(key) + 1, KEY):
            entry = (space, key[:end])
            self.store.write(space, key, end // KEY - 1, page_of(key[:end], space), False)
            self.store.flush()
            if entry in self.order or (end > KEY and (space, key[: end - KEY]) not in self.order):
                continue
            self.time[entry] = max(self.time.values(), default=0) + 1
            self.use(key[:end], space)
            if len(self.order) > self.SLOTS:
                self.order.pop(0)

    @rule(key=keys, space=spaces)
    def read(self, key, space):
        stored = sum((space, key[:end]) in self.order for end in range(KEY, len(key) + 1, KEY))
        assert read(self.store, key, space) == stored
        for end in range(KEY, stored * KEY + 1, KEY):
            self.use(key[:end], space)

    @rule()
    def reopen(self):
        self.store.close()
        self.store = make(self.path / "d", self.SLOTS)
        self.order.sort(key=self.time.__getitem__)
        ends = [(space, key) for space, key in self.order if not any(
            other != key and other[: len(key)] == key and theirs == space for theirs, other in self.order
        )]  # fmt: skip
        for space, key in ends:
            self.use(key, space)

    @invariant()
    def all_is_there(self):
        check(self.store, self.SLOTS)
        assert len(self.store._records) == len(self.order)
        for space, key in self.order:
            assert len(self.store.match(space, key)) == len(key) // KEY


Store.TestCase.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStore = Store.TestCase
