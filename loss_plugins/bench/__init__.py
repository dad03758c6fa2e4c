"""Time, memory and gradient error of every way to compute the loss, on the same inputs in the same run.

`inputs.py` makes them, `contenders.py` lists the ways, `measure.py` is the protocol; results are in ``results/``.
"""
