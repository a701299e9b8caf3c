"""What an installation without extras weighs: `python -m tools.core_install` makes one in a temporary directory.

torch is installed first, as `--torch` says (default: the version that runs this, so the CPU's build where that is what
there is). Counts are those of `pip list`, sizes the bytes of files on disk; pip itself is left out of both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_CODE = """
import json, os
from importlib.metadata import distributions
rows = []
for found in distributions():
    paths = {os.path.realpath(found.locate_file(file)) for file in found.files or ()}
    size = sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
    rows.append({"package": found.metadata["Name"], "version": found.version, "bytes": size})
rows = [row for row in rows if row["package"] not in ("pip", "setuptools")]
print(json.dumps(sorted(rows, key=lambda row: -row["bytes"])))
"""


def measure(torch: str) -> dict[str, Any]:
    """Packages and bytes of a fresh core installation, the largest first."""
    with tempfile.TemporaryDirectory(prefix="isotherm-core-") as directory:
        source, venv = Path(directory, "source"), Path(directory, "venv")
        ignored = shutil.ignore_patterns(".*", "__pycache__", "tests", "build", "*.egg-info")
        shutil.copytree(ROOT, source, ignore=ignored)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        python = str(venv / "bin" / "python")
        for what in (torch, str(source)):
            subprocess.run(
                [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", what],
                check=True,
                stdout=sys.stderr,
            )
        listed = subprocess.run([python, "-c", _CODE], check=True, capture_output=True, text=True, cwd=directory)
    rows = json.loads(listed.stdout)
    return {"packages": len(rows), "bytes": sum(row["bytes"] for row in rows), "rows": rows}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.core_install", description=__doc__)
    parser.add_argument("--torch", default=f"torch=={version('torch')}", help="requirement (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    report = measure(args.torch)
    if args.json:
        print(json.dumps(report))
        return 0
    for row in report["rows"]:
        print(f"{row['package']:24}{row['version']:18}{row['bytes'] / 1e6:9.1f} MB")
    print(f"{report['packages']} packages, {report['bytes'] / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
