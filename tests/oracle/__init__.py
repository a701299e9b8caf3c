"""Independent oracles: nothing here imports the engine, so that an error in it cannot hide in its own test."""
