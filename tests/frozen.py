"""Imported last by the server of processes: garbage collection leaves alone what has been loaded so far.

Otherwise each process would copy most of the server's memory when it first collects garbage.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
