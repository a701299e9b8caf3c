"""`isotherm cache`: what is said of a directory, what is found damaged, and what is deleted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memory.flash import FlashStore
from models.errors import ConfigError
from tools.cache import main

ROOT = Path(__file__).resolve().parents[1]
PAGE, KEY, SLOT = 5000, 8, 8192


def store(path, pages, fingerprint=b"model"):
    store = FlashStore(path, fingerprint, PAGE, KEY, 1 << 20, True)
    for page in range(pages):
        store.write(bytes(32), bytes(range(page * KEY, page * KEY + KEY)), 0, bytes(PAGE), False)
    store.flush()
    return store


@pytest.fixture
def two(tmp_path):
    """A directory with what two models left, three pages and one; the larger file."""
    store(tmp_path, 3).close()
    (file,) = tmp_path.iterdir()
    store(tmp_path, 1, b"other").close()
    return tmp_path, file


def report(capsys, action, path):
    code = main([action, "--flash-cache-dir", str(path), "--json"])
    return code, {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_ls_and_verify_say_what_is_there(two, capsys):
    path, file = two
    for action in ("ls", "verify"):
        code, rows = report(capsys, action, path)
        assert code == 0 and len(rows) == 2
        assert rows[file.name] == {
            "name": file.name, "bytes": 4096 + 3 * SLOT, "version": 1, "records": 3, "damaged": 0,
        }  # fmt: skip
        assert sorted(row["records"] for row in rows.values()) == [1, 3]
    assert main(["ls", "--flash-cache-dir", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("files:\n") and out.count("    damaged: 0\n") == 2
    assert f"  {file.name}:\n" in out and "    version: 1\n    records: 3\n" in out


def test_an_empty_directory(tmp_path, capsys):
    tmp_path.chmod(0o700)
    for action in ("ls", "verify", "clear"):
        assert report(capsys, action, tmp_path) == (0, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("position", "ls", "verify", "version"),
    [(4096 + SLOT + 20, (2, 1), (2, 1), 1),  # the header of a slot
     (4096 + SLOT + 6000, (3, 0), (2, 1), 1),  # its page: found by reading it
     (4096 + 2 * SLOT - 1, (3, 0), (2, 1), 1),  # what is behind its page
     (4000, (0, 1), (0, 1), None)],  # the header of the file
)  # fmt: skip
def test_verify_finds_damage(two, capsys, position, ls, verify, version):
    path, file = two
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
    for action, counts in (("ls", ls), ("verify", verify)):
        code, rows = report(capsys, action, path)
        assert code == (action == "verify")
        assert (rows[file.name]["records"], rows[file.name]["damaged"]) == counts
        assert rows[file.name]["version"] == version
    main(["verify", "--flash-cache-dir", str(path)])
    assert file.name in capsys.readouterr().out


@pytest.mark.parametrize("data", [b"", b"ISOTHERM", b"x" * 3000, bytes(9000)])
def test_files_of_no_known_kind_are_damage(tmp_path, capsys, data):
    tmp_path.chmod(0o700)
    (tmp_path / "0123456789abcdef.kv").write_bytes(data)
    (tmp_path / "notes.txt").write_bytes(data)
    code, rows = report(capsys, "verify", tmp_path)
    assert code == 1 and [(row["version"], row["records"], row["damaged"]) for row in rows.values()] == [(None, 0, 1)]


def test_a_header_that_lies(tmp_path, capsys):
    """Sizes that cannot be, under a name that fits them."""
    from memory.flash import _HEADER, _name

    tmp_path.chmod(0o700)
    for start, slot in ((0, 0), (100, 0), (1 << 40, 1 << 63), (1, 1), (1 << 63, 4096), (60, 60)):
        header = _HEADER.pack(b"ISOTHERM", 1, start, slot, bytes(32)).ljust(4096, b"\0")
        (tmp_path / _name(header)).write_bytes(header + b"x" * 9000)
    for action in ("ls", "verify"):
        code, rows = report(capsys, action, tmp_path)
        assert code == (action == "verify") and sum(row["records"] for row in rows.values()) == 0


def test_clear_deletes_what_it_lists(two, capsys):
    path, file = two
    (path / "notes.kv").write_text("mine")
    (path / "0123456789abcdef.kv").write_text("mine")
    assert main(["clear", "--flash-cache-dir", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("deleted") and file.name in out and "0123456789abcdef" not in out
    assert sorted(file.name for file in path.iterdir()) == ["0123456789abcdef.kv", "notes.kv"]
    assert report(capsys, "clear", path) == (0, {})


def test_a_directory_in_use_is_listed_and_not_touched(tmp_path, capsys):
    open_store = store(tmp_path / "d", 2)
    code, rows = report(capsys, "ls", tmp_path / "d")
    assert code == 0 and [row["records"] for row in rows.values()] == [2]
    for action in ("verify", "clear"):
        with pytest.raises(ConfigError, match=f"{tmp_path / 'd'}: in use by process {os.getpid()}"):
            main([action, "--flash-cache-dir", str(tmp_path / "d")])
    open_store.close()
    assert report(capsys, "verify", tmp_path / "d")[0] == 0


def test_what_cannot_be_listed(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        main(["ls", "--flash-cache-dir", str(tmp_path / "open")])
    (tmp_path / "link").symlink_to(tmp_path / "open")
    for name, error in (("none", "No such file"), ("link", "Not a directory")):
        with pytest.raises(ConfigError, match=f"{error}.*{name}"):
            main(["ls", "--flash-cache-dir", str(tmp_path / name)])
        assert not (tmp_path / "none").exists()


def test_what_is_named_as_ours_and_is_no_file_is_left_alone(two, capsys):
    path, file = two
    (path / f"{1:016x}.kv").mkdir()
    (path / f"{2:016x}.kv").symlink_to(file)
    os.mkfifo(path / f"{3:016x}.kv")
    for action in ("ls", "verify", "clear"):
        code, rows = report(capsys, action, path)
        assert code == 0 and len(rows) == 2 and file.name in rows
    assert sorted(left.name for left in path.iterdir()) == [f"{i:016x}.kv" for i in (1, 2, 3)]


@pytest.mark.parametrize("args", [[], ["ls"], ["drop", "--flash-cache-dir", "d"]])
def test_usage(args, capsys):
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: ")


def test_the_command_imports_no_torch(two):
    code = (
        "import sys; from tools.cache import main; main(sys.argv[1:]);"
        "print(sorted({'torch', 'numpy', 'tqdm'} & set(sys.modules)), file=sys.stderr)"
    )
    args = [sys.executable, "-c", code, "verify", "--flash-cache-dir", str(two[0])]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n" and done.stdout.count("    damaged: 0\n") == 2
