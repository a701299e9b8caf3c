"""`python -m engine.doctor` and `isotherm doctor`: tools/doctor.py, by the name under which users know it."""

from engine.cli import main_of, run

if __name__ == "__main__":
    run(lambda argv: main_of("doctor")(argv))
