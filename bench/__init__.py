"""The comparison with PyTorch: `python -m bench --help`."""
