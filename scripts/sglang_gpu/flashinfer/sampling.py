"""The same of its functions that draw tokens: sampling is torch's."""

import flashinfer

__getattr__ = flashinfer.__getattr__
