"""`isotherm <command>` and `python -m engine <command>`."""

from engine.signals import exit_at_once

exit_at_once()  # before the other imports take their time

import sys

from engine.cli import COMMANDS, command_hint, main_of, run


def dispatch(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return main_of(argv[0])(argv[1:])
    texts = [f"  {name:10} {row['description']}" for name, row in COMMANDS.items()]
    lines = ["usage: isotherm <command> [options]", "", *texts]
    wanted = bool(argv) and argv[0] in ("-h", "--help")
    if argv and not wanted:
        lines.append(command_hint(argv[0], COMMANDS))
    print("\n".join(lines), file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else 2


def main() -> None:
    run(dispatch)


if __name__ == "__main__":
    main()
