"""Main program of the guard's container: ends the pod when its provider has not been heard of for a while.

Run with `python3 -c` before anything else is in the pod, so it imports the standard library alone.
Argument: seconds. The guard writes the time of the last sign of life.
"""

import os
import signal
import sys
import time
from pathlib import Path

BEAT = Path("/run/legorl/beat")


def main() -> None:
    """Returns never; kills every process of the pod in the end."""
    limit = float(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    BEAT.write_text(str(time.monotonic()))
    while time.monotonic() - float(BEAT.read_text() or 0) < limit:
        signal.sigtimedwait([signal.SIGUSR1], 1)
    os.kill(-1, signal.SIGKILL)


if __name__ == "__main__":
    main()
