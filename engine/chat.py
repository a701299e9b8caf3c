"""`python -m engine.chat` and `isotherm chat`: tools/chat.py, by the name under which users know it."""

from engine.cli import main_of, run

if __name__ == "__main__":
    run(lambda argv: main_of("chat")(argv))
