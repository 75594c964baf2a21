"""What Ray starts in place of Python: asks the fork server for a warm worker and stands in for it.

Started as `python -I -S fork_client.py SOCKET default_worker.py ...`; only the standard library, no site.
Forwards its arguments, environment, directory and open standard streams, and dies with the worker.
"""

import array
import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path


def main() -> int:
    """Exit status of the worker."""
    # With the raylet dead nobody wants this worker: PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    wanted = {"argv": sys.argv[2:], "env": dict(os.environ), "cwd": str(Path.cwd())}
    request = json.dumps(wanted).encode() + b"\0"
    descriptors = array.array("i", [0, 1, 2])
    sent = connection.sendmsg([request[:60000]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    connection.sendall(request[sent:])
    answers = connection.makefile("rb")
    worker = int(answers.readline())

    def forward(number: int, _frame: object) -> None:
        os.kill(worker, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    return int(answers.read() or 1)


if __name__ == "__main__":
    sys.exit(main())
