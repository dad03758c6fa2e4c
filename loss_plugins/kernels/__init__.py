"""The kernels: tensors in, tensors out. Imports nothing else of this package, so the folder can be moved as it is.

`ops.py` is the way in. `README.md` has the maths by number. Each backend is a folder with the same entry functions.
"""
