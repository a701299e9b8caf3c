"""Pages on flash: exact K and V that outlive memory and, where that is wanted, the process (no torch, no numpy).

    directory   0700, ours, locked    isotherm.lock   PID of who has it
                                      3f..a1.kv       one file a layout: 16 digits of its header's SHA-256
    file        [ header | slot 0 | slot 1 | slot 2 ...       all multiples of 4,096 bytes
    slot        [ CRC of this header, CRC of the rest | id | lossy | parent | tokens of the page | K and V ... ]
    index       {(parent, tokens of the page): record}        read from the slots' headers at the start
    parent      the id of the page before; of a text's first page its namespace, with a 1 above it

A page is found from the first one of its text on, step by step, and each step compares its tokens: no hash stands for
them. Ids are never used again, also not by a later process, so what follows a page that is lost is never found behind
another one: it is waste, until its turn to go comes.

What is written is checked when it is read: a slot's header must be, byte for byte, what the index would write above
the bytes behind it. So a slot that was lost, torn, flipped or put elsewhere is a miss, and as slots have fixed places,
those behind it are found all the same. After a crash the file has what was written until then.

Writing is one thread's. A page counts as stored, and is read from memory, from the moment it is queued. When all slots
are taken, the record that was written or read least lately leaves the index and its slot is written over; never one
before those that follow it, so that what is left of a text is its beginning. Nothing is synced but a file that stays,
at the end: what a power cut takes is a miss like any other.

Sealed slots are [ nonce | the slot, encrypted | tag ] by AES-GCM (NIST SP 800-38D) under a key that only this process
has: nobody can read what a killed one left, and the next store there deletes it.

Rejected: append-only segments (making room copies what is still used, and takes the oldest pages, which the others
cannot be found without; a lost slot stays lost until then); mmap (a full disk or a truncated file is a SIGBUS); an
index on flash (it can disagree with the slots); an exception for damage (no caller can but go without the page).
"""

import fcntl
import hashlib
import logging
import os
import re
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

log = logging.getLogger("isotherm")

_BLOCK = 4096
_MAGIC, _VERSION, _SEALED = b"ISOTHERM", 1, 257
_NONCE, _TAG = 12, 16  # bytes
_HEADER = struct.Struct("<8sIQQ32s")  # magic, version, where a slot's page begins, bytes of a slot, fingerprint
_SLOT = struct.Struct("<IQ?33s")  # CRC32 of the rest, id, lossy, parent; in front the CRC32 of the header, then tokens
_LOCK = "isotherm.lock"
_QUEUE_BYTES = 64 << 20  # that wait for the writer, at most; one page always may


class StoreRefused(ValueError):
    """The directory cannot be used as it is; the message says why, and the way out."""


@dataclass(slots=True, eq=False)
class _Record:
    """A page that is stored, or queued for it."""

    id: int
    parent: int
    tokens: bytes
    lossy: bool
    slot: int = -1
    image: bytearray | None = None  # the whole slot, until it is written

    def head(self, crc: int) -> bytes:
        """What its slot begins with, where this is the CRC of the rest."""
        body = _SLOT.pack(crc, self.id, self.lossy, self.parent.to_bytes(33, "little")) + self.tokens
        return zlib.crc32(body).to_bytes(4, "little") + body


def _name(header: bytes) -> str:
    return hashlib.sha256(header).hexdigest()[:16] + ".kv"


def _scan(fd: int, start: int, size: int, verify: bool = False) -> Iterator[_Record | None]:
    """What the slots have that were written; None: damage. verify: read the pages too."""
    for slot in range((os.fstat(fd).st_size - _BLOCK) // size):
        record = None
        with suppress(OSError, struct.error):
            image = os.pread(fd, size if verify else start, _BLOCK + slot * size)
            head = image[:start]
            if not any(head):
                continue
            crc, number, lossy, parent = _SLOT.unpack_from(head, 4)
            found = _Record(number, int.from_bytes(parent, "little"), head[4 + _SLOT.size :], lossy, slot)
            record = found if found.head(zlib.crc32(image[start:]) if verify else crc) == head else None
        yield record


def _enter(path: Path, stack: ExitStack, lock: bool = True) -> int:
    """The directory's descriptor: whoever puts another one or a link in its place changes nothing for us."""
    fd = _open(path, None, stack, os.O_DIRECTORY)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise StoreRefused(f"{path}: others own it or may write to it; chmod 700 {path}, or give another directory")
    if lock:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = "that starts or ends"
            with suppress(OSError):
                owner = (path / _LOCK).read_text(errors="replace").strip()
            raise StoreRefused(f"{path}: in use by process {owner}; end it, or give another directory") from None
        os.pwrite(_open(_LOCK, fd, stack, os.O_RDWR | os.O_CREAT | os.O_TRUNC), b"%d\n" % os.getpid(), 0)
        stack.callback(_try, os.unlink, _LOCK, dir_fd=fd)
    return fd


def _open(name: str | Path, directory: int | None, stack: ExitStack, flags: int = os.O_RDONLY) -> int:
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=directory)
    stack.callback(os.close, fd)
    return fd


def _sizes(directory: int) -> dict[str, int]:
    """Bytes of the files that are named as ours."""
    found = [entry for entry in os.scandir(directory) if re.fullmatch(r"[0-9a-f]{16}\.kv", entry.name)]
    return {one.name: one.stat(follow_symlinks=False).st_size for one in found if one.is_file(follow_symlinks=False)}


def _cipher() -> tuple[Any, tuple[type[Exception], ...]]:
    """AES-GCM with a fresh key, and what it raises where something is not what it wrote. Raises StoreRefused."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise StoreRefused("sealing needs the package cryptography: pip install 'isotherm[crypto]'") from None
    return AESGCM(AESGCM.generate_key(256)), (OSError, ValueError, InvalidTag)  # ValueError: of a part of a nonce


def _delete_sealed(directory: int) -> None:
    """What processes left that were killed, as nobody can read it."""
    for name in _sizes(directory):
        with ExitStack() as stack, suppress(OSError):
            if os.pread(_open(name, directory, stack), 12, 0) == _MAGIC + _SEALED.to_bytes(4, "little"):
                os.unlink(name, dir_fd=directory)


def _try(call: Callable[..., None], *args: Any, **options: Any) -> None:
    with suppress(OSError):
        call(*args, **options)


class FlashStore:
    """Pages of `page_bytes`, found by all tokens that lead to them, `key_bytes` of them a page. One owner calls it."""

    def __init__(self, directory: Path, fingerprint: bytes, page_bytes: int, key_bytes: int, capacity_bytes: int,
                 persist: bool, seal: bool = False) -> None:  # fmt: skip
        """Opens what the directory has of this fingerprint. capacity_bytes: of all files of ours there, also those of
        other fingerprints, which are left alone. persist: the file stays there at the end. seal: nobody else can read
        it, nor this process when it has ended. Raises StoreRefused."""
        self._cipher: Any = None
        self._damage: tuple[type[Exception], ...] = (OSError,)
        if seal:
            self._cipher, self._damage = _cipher()
        self._path, self._key_bytes, self._page_bytes = directory, key_bytes, page_bytes
        self._start = 4 + _SLOT.size + key_bytes
        self._slot_bytes = -(-(self._start + page_bytes + (_NONCE + _TAG) * seal) // _BLOCK) * _BLOCK
        self._records: dict[int, _Record] = {}  # by their ids, those that go first first
        self._index: dict[tuple[int, bytes], _Record] = {}
        self._queued, self._off = 0, False  # bytes; whether writing is
        names = ("hits", "misses", "corrupt", "writes", "write_errors", "read_seconds")
        self._counts: dict[str, int | float] = dict.fromkeys(names, 0)
        self._lock = threading.Lock()  # of the index and the free slots; nobody writes a page under it
        self._writer = ThreadPoolExecutor(1, "flash")
        fingerprint += os.urandom(_NONCE) if seal else b""
        digest = hashlib.sha256(b"%d %d " % (key_bytes, page_bytes) + fingerprint).digest()
        version = _SEALED if seal else _VERSION
        header = _HEADER.pack(_MAGIC, version, self._start, self._slot_bytes, digest).ljust(_BLOCK, b"\0")
        try:
            with ExitStack() as stack:
                if not directory.exists():
                    directory.mkdir(0o700, parents=True)
                    stack.callback(_try, directory.rmdir)  # which fails unless it is empty
                self._begin(_enter(directory, stack), header, capacity_bytes, persist, stack)
                self._end = weakref.finalize(self, stack.pop_all().close)
        except OSError as error:
            raise StoreRefused(f"{directory}: {error}; give a directory of your own, and no link to one") from None

    def _begin(self, directory: int, header: bytes, capacity: int, persist: bool, stack: ExitStack) -> None:
        _delete_sealed(directory)
        name, sizes = _name(header), _sizes(directory)
        room = capacity - sum(sizes.values()) + sizes.get(name, 0)
        slots = (room - _BLOCK) // self._slot_bytes
        if slots < 1:
            need = f"a page needs {_BLOCK + self._slot_bytes} bytes, and of {capacity} other models left {room}"
            raise StoreRefused(f"{self._path}: {need}: set a larger --flash-cache-size, or isotherm cache clear")
        self._fd = _open(name, directory, stack, os.O_RDWR | (0 if name in sizes else os.O_CREAT | os.O_EXCL))
        if persist:
            stack.callback(_try, os.fsync, self._fd)
        else:
            stack.callback(_try, os.unlink, name, dir_fd=directory)
        intact = os.pread(self._fd, _BLOCK, 0) == header
        os.ftruncate(self._fd, min(sizes[name], _BLOCK + slots * self._slot_bytes) if intact else 0)
        os.pwrite(self._fd, header, 0)
        found = sorted(filter(None, _scan(self._fd, self._start, self._slot_bytes)), key=lambda record: record.id)
        for record in found:  # a page's parent before it
            if record.parent >> 256 or record.parent in self._records:
                self._records[record.id] = self._index[record.parent, record.tokens] = record
        for number in sorted(self._records.keys() - {record.parent for record in self._records.values()}):
            self._touch(self._records[number])
        self._free = sorted(set(range(slots)) - {record.slot for record in self._records.values()}, reverse=True)
        # The clock is ahead of every id that was ever used, also of those that cannot be read today.
        self._next = max([time.time_ns(), *(record.id for record in found)]) + 1

    def match(self, namespace: bytes, key: bytes, exact: bool = False) -> list[int]:
        """The ids of the key's leading full pages that are stored, and exact if so asked. namespace: 32 bytes."""
        found = self._walk(namespace, key)[1:]
        return list(takewhile(self._is_exact, found)) if exact else found

    def _is_exact(self, number: int) -> bool:
        record = self._records.get(number)  # which the writer may have dropped by now
        return record is not None and not record.lossy

    def _walk(self, namespace: bytes, key: bytes) -> list[int]:
        """The parent of the first page, and the ids of those that are stored."""
        path = [int.from_bytes(namespace + b"\1", "little")]
        for end in range(self._key_bytes, len(key) + 1, self._key_bytes):
            record = self._index.get((path[-1], key[end - self._key_bytes : end]))
            if record is None:
                break
            path.append(record.id)
        return path

    def read(self, number: int) -> tuple[memoryview, bool] | None:
        """A record's page, and whether it is lossy; None where it is lost, which is counted."""
        begun = time.perf_counter()
        with self._lock:
            record = self._records.get(number)
            image = record and (record.image or self._load(record))  # what is queued is not on flash yet
            self._counts["hits" if image else "misses"] += 1
            self._counts["read_seconds"] += time.perf_counter() - begun
            if not record or not image:
                return None
            self._touch(record)
        return memoryview(image)[self._start : self._start + self._page_bytes].toreadonly(), record.lossy

    def write(self, namespace: bytes, key: bytes, page: int, payload: bytes | memoryview, lossy: bool) -> bool:
        """Queue the key's page of this number, and say whether it is stored or will be. Nothing happens if it is, but
        that an exact one takes the place of a lossy one once it is written; nor if the one before it is not stored, if
        too much is queued, or if writing is off."""
        end = (page + 1) * self._key_bytes
        path = self._walk(namespace, key[:end])
        old = self._records.get(path[-1]) if len(path) == page + 2 else None
        if old and (lossy or not old.lossy):
            return True
        full = self._queued and self._queued + self._slot_bytes > _QUEUE_BYTES
        if self._off or full or len(path) <= page:
            return False
        size = self._slot_bytes - (_NONCE + _TAG if self._cipher else 0)
        image = bytearray(size)
        image[self._start : self._start + self._page_bytes] = payload
        assert len(image) == size, "a page of another size"
        number = old.id if old else self._next  # so that what follows the old one follows the new
        record = _Record(number, path[page], key[end - self._key_bytes : end], lossy, image=image)
        with self._lock:
            if not old:
                self._enlist(record)
            self._next += 1
            self._queued += self._slot_bytes
        self._writer.submit(self._store, record, image, old)
        return True

    def close(self) -> None:
        """Write what is queued, and leave the directory; else that happens when the store, or the process, goes."""
        self._writer.shutdown()
        self._off = True
        self._records.clear()
        self._index.clear()
        self._end()

    def stats(self) -> dict[str, int | float]:
        held = {"records": len(self._records), "flash_bytes": len(self._records) * self._slot_bytes}
        read = {"read_bytes": self._counts["hits"] * self._page_bytes, "switched_off": self._off}
        return self._counts | held | read

    # Under the lock.

    def _enlist(self, record: _Record) -> None:
        self._records[record.id] = self._index[record.parent, record.tokens] = record
        self._touch(record)

    def _touch(self, record: _Record | None) -> None:
        """Have the record and all that lead to it go last, in this order."""
        while record:
            self._records[record.id] = self._records.pop(record.id)
            record = self._records.get(record.parent)

    def _drop(self, record: _Record) -> None:
        if self._records.get(record.id) is record:
            del self._records[record.id]
            if record.slot >= 0:
                self._free.append(record.slot)
        if self._index.get((record.parent, record.tokens)) is record:
            del self._index[record.parent, record.tokens]

    def _load(self, record: _Record) -> bytes | None:
        with suppress(*self._damage):
            image = os.pread(self._fd, self._slot_bytes, _BLOCK + record.slot * self._slot_bytes)
            if self._cipher:
                image = self._cipher.decrypt(image[:_NONCE], image[_NONCE:], None)
            if record.head(zlib.crc32(memoryview(image)[self._start :])) == image[: self._start]:
                return image
        self._counts["corrupt"] += 1
        self._drop(record)
        return None

    # In the writer's thread.

    def _store(self, record: _Record, image: bytearray, old: _Record | None) -> None:
        """Write a record that is enlisted, or one that takes the place of an old one, if that is still there then."""
        place = old or record
        image[: self._start] = record.head(zlib.crc32(memoryview(image)[self._start :]))
        with self._lock:
            while not (self._free or self._off) and self._records.get(record.id) is place:
                self._drop(next(iter(self._records.values())))
            slot = self._free.pop() if self._records.get(record.id) is place and not self._off else -1
        sealed: bytes | bytearray = image
        if self._cipher:
            sealed = (nonce := os.urandom(_NONCE)) + self._cipher.encrypt(nonce, bytes(image), None)
        try:
            if slot >= 0 and os.pwrite(self._fd, sealed, _BLOCK + slot * len(sealed)) < len(sealed):
                raise OSError("short write")
        except OSError as error:
            slot, self._off = -1, True
            self._counts["write_errors"] += 1
            log.warning("%s: %s: no more is written there; what is there is still read", self._path, error)
        with self._lock:
            self._queued -= self._slot_bytes
            self._counts["writes"] += slot >= 0
            record.slot, record.image = slot, None
            if slot < 0:
                self._drop(record)
            elif old and self._records.get(old.id) is old:
                self._drop(old)
                self._enlist(record)
            elif old:
                self._free.append(slot)


def inspect(directory: Path, verify: bool = False) -> list[dict[str, Any]]:
    """A row for each file in the directory, of every fingerprint. verify: read the pages too, while nobody writes.
    Raises StoreRefused, OSError."""
    rows = []
    with ExitStack() as stack:
        parent = _enter(directory, stack, lock=verify)
        for name, size in sorted(_sizes(parent).items()):
            fd = _open(name, parent, stack)
            header = os.pread(fd, _BLOCK, 0).ljust(_BLOCK, b"\0")
            _, version, start, slot_bytes, _ = _HEADER.unpack_from(header)
            intact = _name(header) == name and slot_bytes >= start > _SLOT.size
            found = list(_scan(fd, start, slot_bytes, verify)) if intact and version == _VERSION else []
            damaged = found.count(None)
            counts = {"records": len(found) - damaged, "damaged": damaged + (not intact)}
            rows.append({"name": name, "bytes": size, "version": version if intact else None} | counts)
    return rows


def clear(directory: Path) -> list[str]:
    """Delete our files in the directory, of every fingerprint and version. Raises StoreRefused while it is in use."""
    with ExitStack() as stack:
        parent = _enter(directory, stack)
        names = [name for name in _sizes(parent) if _MAGIC.startswith(os.pread(_open(name, parent, stack), 8, 0))]
        for name in names:
            os.unlink(name, dir_fd=parent)
        return names
