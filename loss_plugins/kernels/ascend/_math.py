"""The one function that Triton has in a different place on every version for Ascend.

triton-ascend 3.2.0 keeps it in ``triton.language.extra.ascend``, 3.2.1 and later in ``triton.language.extra.cann``; the
general ``triton.language.extra.libdevice`` has a function of that name on both which returns nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cann.libdevice import tanh
except ImportError:
    try:
        from triton.language.extra.ascend.libdevice import tanh
    except ImportError:  # another Triton: its interpreter, in tests

        @triton.jit
        def tanh(b_x):
            return 2 * tl.sigmoid(2 * b_x) - 1


__all__ = ["tanh"]
