"""`isotherm completion bash|zsh`: a completion script; `tools.make_completion` makes them (no torch).

isotherm completion bash > ~/.local/share/bash-completion/completions/isotherm
isotherm completion zsh > "${fpath[1]}/_isotherm"
"""

from pathlib import Path

from engine.cli import parser, run


def main(argv: list[str] | None = None) -> int:
    shell = parser("completion").parse_args(argv).shell
    print(Path(__file__).with_name(f"completion.{shell}").read_text("utf-8"), end="")
    return 0


if __name__ == "__main__":
    run(main)
