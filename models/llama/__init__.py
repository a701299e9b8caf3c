"""The Llama family: configuration, rotary positions, forward pass. Importing this package does not import torch."""
