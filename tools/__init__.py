"""Programs around the engine: benchmarks, reports, converters, set-up. Run as `python -m tools.NAME`."""
