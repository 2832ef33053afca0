"""The committed results as one HTML page and as README's tables: `python -m benchmarks.report`."""
