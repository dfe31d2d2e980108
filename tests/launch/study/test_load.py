import os
import signal
import subprocess
import sys
import time

from launch.study.load import LoadWatch

CHILD = "import time\nwhile time.process_time() < 1.0: pass\ntime.sleep(60)"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_what_a_process_and_those_it_started_use_is_told_from_what_others_use() -> None:
    process = subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True)
    watch = LoadWatch(process.pid)
    deadline = time.monotonic() + 30
    while watch.used().own < 1.0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        watch.look()
    before = watch.used()
    started = time.process_time()
    while time.process_time() - started < 0.5:  # this process is one of the others
        pass
    watch.look()
    after = watch.used()
    assert before.own >= 1.0 and after.own - before.own < 0.3
    assert before.others >= 0.0 and 0.0 < after.others <= 1.0
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    watch.look()  # of a process that has ended, what it had used is kept
    assert watch.used().own >= after.own
