"""The suites of `benchmarks.run`: each module has `run(settings, workers, results)`, which returns its tables."""
