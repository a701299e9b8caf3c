"""`python -m engine.doctor` and `isotherm doctor`: tools/doctor.py, by the name under which users know it."""

import pkgutil

from engine.cli import COMMANDS, run

if __name__ == "__main__":
    run(pkgutil.resolve_name(COMMANDS["doctor"]["main"]))
