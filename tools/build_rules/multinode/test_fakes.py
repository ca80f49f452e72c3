"""Stand-ins for srun, sbatch and the rest, and a PATH that has them and no real ones.

Each call is recorded with its words, its standard input and its environment. srun and mpirun then run the ranks
on this host; what else they do, a test says by variables:
  FAKE_MPI_KINDS   what `srun --mpi=list` knows
  FAKE_STATUS      what srun returns, in the place of the worst status of a rank
  FAKE_SKIP_RANKS  ranks that are not started, as 1,2
  FAKE_JOB_STATES  what scontrol answers, one after the other, as PENDING,RUNNING,COMPLETED:0:0; or an error
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

NAMES = ("srun", "sbatch", "salloc", "scontrol", "scancel", "squeue", "sinfo", "mpirun", "module")


class Fakes:
    """A folder with fakes of `names`, and links to all that is in /usr/bin besides."""

    def __init__(self, names):
        self.folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        self.bin = os.path.join(self.folder, "bin")
        self.home = os.path.join(self.folder, "home")
        self.stage = os.path.join(self.home, ".cache/lockstep/stage")
        os.makedirs(self.bin)
        os.makedirs(self.home)
        for name in os.listdir("/usr/bin"):
            if name not in NAMES:
                os.symlink("/usr/bin/" + name, os.path.join(self.bin, name))
        for name in names:
            path = os.path.join(self.bin, name)
            with open(path, "w") as f:
                f.write("#!/bin/bash\nexec /usr/bin/python3 %s %s %s \"$@\"\n" %
                        (os.path.abspath(__file__), self.folder, name))
            os.chmod(path, 0o755)

    def environment(self, **more):
        kept = {name: os.environ[name] for name in ("TEST_TMPDIR", "TMPDIR", "LANG") if name in os.environ}
        return dict(kept, PATH=self.bin, HOME=self.home, **more)

    def calls(self, name):
        """All calls of a fake since the last time."""
        path = os.path.join(self.folder, name + ".calls")
        if not os.path.exists(path):
            return []
        with open(path) as f:
            calls = [json.loads(line) for line in f]
        os.remove(path)
        return calls

    def remove(self):
        shutil.rmtree(self.folder)


def _next_state(folder):
    path = os.path.join(folder, "states")
    left = open(path).read().split(",") if os.path.exists(path) else os.environ["FAKE_JOB_STATES"].split(",")
    with open(path, "w") as f:
        f.write(",".join(left[1:] or left))
    return left[0]


def _run_ranks(name, words):
    start = next(i for i, word in enumerate(words) if word.endswith("/rank.sh"))
    flags = words[:start]
    ranks = int(next(w for w in flags if w.startswith("--ntasks="))[9:] if name == "srun" else flags[flags.index("-n") + 1])
    variable = "SLURM_PROCID" if name == "srun" else "OMPI_COMM_WORLD_RANK"
    skipped = os.environ.get("FAKE_SKIP_RANKS", "").split(",")
    started = [subprocess.Popen(words[start:], env=dict(os.environ, **{variable: str(rank)})) for rank in range(ranks)
               if str(rank) not in skipped]
    statuses = [process.wait() for process in started]
    return int(os.environ.get("FAKE_STATUS") or max(statuses, default=0))


def main():
    folder, name, words = sys.argv[1], sys.argv[2], sys.argv[3:]
    text = sys.stdin.read() if name == "sbatch" else ""
    with open(os.path.join(folder, name + ".calls"), "a") as f:
        f.write(json.dumps({"words": words, "input": text, "env": dict(os.environ), "cwd": os.getcwd()}) + "\n")
    if words == ["--mpi=list"]:
        print("MPI plugin types are...\n\t" + "\n\t".join(os.environ.get("FAKE_MPI_KINDS", "").split()), file=sys.stderr)
        return 0
    if name in ("srun", "mpirun"):
        return _run_ranks(name, words)
    if name == "sbatch":
        if "FAKE_REFUSAL" in os.environ:
            print(os.environ["FAKE_REFUSAL"], file=sys.stderr)
            return 1
        output = next(word for word in words if word.startswith("--output="))[9:].replace("%j", "17")
        with open(output, "w") as f:
            f.write("the output\n")
        print("17;cluster")
    if name == "scontrol":
        state = _next_state(folder)
        if state.startswith("error "):
            print(state, file=sys.stderr)
            return 1
        state, _, code = state.partition(":")
        print("JobId=17 JobName=x JobState=%s Reason=%s Dependency=(null) ExitCode=%s" %
              (state, {"PENDING": "Resources", "TIMEOUT": "TimeLimit"}.get(state, "None"), code or "0:0"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
