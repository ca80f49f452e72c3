"""Submits a batch job, shows what it prints, and cancels it when interrupted."""
import os
import signal
import subprocess
import sys
import time
from typing import Dict, List, Optional, Tuple

from site_file import Error

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RUNNING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED",
            "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "PREEMPTED")
_SECONDS_WITHOUT_ANSWER = 120  # a controller may be away for a while
_SECONDS_TO_END = 120  # after scancel: KillWait of Slurm and then some


class Interrupted(Exception):
    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def say(text: str) -> None:
    sys.stdout.flush()
    print("multinode_run: " + text, file=sys.stderr, flush=True)


def _fail_on_signals() -> None:
    def interrupt(number, _):
        raise Interrupted(number)
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def submit(words: List[str], script: str) -> str:
    """Returns the number of the job."""
    done = subprocess.run(words, input=script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
                          start_new_session=True)  # Ctrl-C ends it not, or there might be a job of unknown number
    if done.returncode != 0:
        raise Error("sbatch refused the job: " + (done.stderr.strip() or "status %d" % done.returncode))
    sys.stderr.write(done.stderr)
    job = done.stdout.strip().split(";")[0]  # JOB;CLUSTER
    if not job.isdigit():
        raise Error("sbatch gave no number of a job but %r" % done.stdout)
    return job


class _Output:
    """Copies what a growing file has got to stdout."""

    def __init__(self, path: str):
        self._path = path
        self._position = 0

    def copy(self) -> bool:
        try:
            with open(self._path, "rb") as f:
                f.seek(self._position)
                text = f.read()
        except OSError:
            return False  # not yet there
        self._position += len(text)
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
        return bool(text)


def _ask(job: str) -> Tuple[Optional[Dict[str, str]], str]:
    """What Slurm knows of a job, or None and what it says instead."""
    done = subprocess.run(["scontrol", "--oneliner", "show", "job", job], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, start_new_session=True)
    if done.returncode != 0:
        return None, done.stderr.strip()
    pairs = (word.partition("=") for word in done.stdout.split())
    fields = {}  # type: Dict[str, str]
    for name, _, value in pairs:
        fields.setdefault(name, value)
    return fields, ""


class Follower:
    def __init__(self, job: str, output: str):
        self._job = job
        self._output = _Output(output)
        self._path = output
        self._said = ""
        self._heard = time.monotonic()

    def _look(self) -> Optional[Dict[str, str]]:
        """Fields of the job once it has ended."""
        fields, error = _ask(self._job)
        now = time.monotonic()
        if fields is None:
            if "Invalid job id" in error or now - self._heard > _SECONDS_WITHOUT_ANSWER:
                raise Error("Slurm does not tell how job %s ended: %s. Its output: %s" % (self._job, error, self._path))
            return None
        self._heard = now
        state = fields.get("JobState", "")
        if state == "PENDING":
            text = "job %s waits: %s" % (self._job, fields.get("Reason", ""))
            if text != self._said and fields.get("Reason", "None") != "None":
                self._said = text
                say(text)
        return None if state in _RUNNING else fields

    def follow(self, deadline: Optional[float] = None) -> Optional[Dict[str, str]]:
        """Shows the output until the job has ended; returns what Slurm knows of it then."""
        start = time.monotonic()
        next_look = start
        while True:
            self._output.copy()
            now = time.monotonic()
            if now >= next_look:
                fields = self._look()
                if fields is not None:
                    while True:  # file systems of other nodes show it a little later
                        time.sleep(0.5)
                        if not self._output.copy():
                            return fields
                # Slurm's controller is shared by all users.
                next_look = now + (1 if now - start < 60 else 10)
            if deadline is not None and now > deadline:
                return None
            time.sleep(0.2)

    def cancel(self, number: int) -> int:
        say("cancelling job %s" % self._job)
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        subprocess.run(["scancel", self._job], start_new_session=True)
        try:
            ended = self.follow(deadline=time.monotonic() + _SECONDS_TO_END)
        except Error as error:
            say(str(error))
            ended = {}
        say("job %s is cancelled" % self._job if ended is not None else "job %s has not ended yet: squeue --job=%s" %
            (self._job, self._job))
        return 128 + number


def run(words: List[str], script: str, output: str, detach: bool) -> int:
    """Exit status of the job. output: its file, with %j for its number."""
    directory = os.path.dirname(output)
    if not os.access(directory, os.W_OK):
        raise Error("%s cannot be written to, and the output of the job is to go there: start this in another folder" %
                    directory)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    job = submit(words, script)
    follower = Follower(job, output.replace("%j", job))
    if detach:
        print(job, flush=True)
        say("its output: %s; to end it: scancel %s" % (output.replace("%j", job), job))
        return 0
    say("job %s, output in %s" % (job, output.replace("%j", job)))
    try:
        _fail_on_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        fields = follower.follow() or {}
    except Interrupted as interrupted:
        return follower.cancel(interrupted.number)
    if not os.path.exists(output.replace("%j", job)):
        say("its output is not here: a folder that only this host sees? Start this in one that all nodes see")
    state = fields.get("JobState", "UNKNOWN")
    status, _, by_signal = fields.get("ExitCode", "1:0").partition(":")
    if state == "COMPLETED" and status == "0":
        return 0
    say("job %s: %s%s" % (job, state, ", " + fields["Reason"] if fields.get("Reason", "None") != "None" else ""))
    return int(status) or (128 + int(by_signal) if by_signal.isdigit() and int(by_signal) else 1)
