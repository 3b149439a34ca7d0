"""`gpp-doctor` as if each rank were on a machine of its own."""

from __future__ import annotations

import os
import socket

from lightning_gpp.cli.doctor import main

if __name__ == "__main__":
    socket.gethostname = lambda: f"node{os.environ['RANK']}"
    main()
