"""Writes a tiny random Llama with a sentencepiece tokenizer to the directory given."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from oracle.checkpoint import make_checkpoint

make_checkpoint(Path(sys.argv[1]), seed=1, eos_token_id=None)
