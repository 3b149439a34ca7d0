"""`gpp-doctor` as if each rank were on a machine of its own, with a folder of its own, and rank 1 with an old torch."""

from __future__ import annotations

import os
import sys

from lightning_gpp.cli import examination
from lightning_gpp.cli.doctor import main

RANK = os.environ["RANK"]
VERSIONS = {"0": "torch 2.13", "1": "torch 2.10"}

if __name__ == "__main__":
    examination._facts = lambda index: (f"node{RANK}", "", VERSIONS[RANK])
    main([f"--folder={sys.argv[1]}/{RANK}", f"--output={sys.argv[1]}/lab.yaml"])
