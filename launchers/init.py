"""First process of a job's PID namespace: starts the job, reaps orphans, passes signals on.

Run as a script with the standard library only: `init.py CONTROL_FD JOB...`. The supervisor holds the other
end of the control pipe; a byte is a signal number for the job, and its end means the supervisor is gone.
Invariant: when this process ends, for whatever reason, the kernel kills every other one in the namespace.
"""

import os
import select
import signal
import subprocess
import sys


def main() -> int:
    """Returns the job's exit status, 128+n for signal n."""
    control = int(sys.argv[1])
    os.set_inheritable(control, False)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for waking in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(waking, lambda *_: None)  # only wakes; a handler, unlike SIG_IGN, is not inherited
    # Shared memory of its own: what a killed worker leaves in it goes with the namespace.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "legorl", "/dev/shm"], check=True)
    job = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if control in ready:
            numbers = os.read(control, 64)
            if not numbers:
                return 128 + int(signal.SIGKILL)
            for number in numbers:
                job.send_signal(number)
        if woken in ready:
            os.read(woken, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                break
            if pid == job.pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main())
