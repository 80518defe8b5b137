"""Without a GPU to find, CuTe's DSL takes another than Hopper for granted. It looks when it is first imported."""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
