"""Models: checkpoints on disk, and the Llama forward pass. Importing this package does not import torch."""
