"""What is tested on the simulated device, in processes of its own (`../test_simulated.py`).

By hand: `python -m pytest -o python_files='check_*.py' tests/device/simulated`.
"""
