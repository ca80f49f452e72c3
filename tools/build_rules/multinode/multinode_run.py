#!/usr/bin/env python3
"""Starts a program on many nodes: multinode_run.py RUNFILES CONFIG [ARGUMENT...]

CONFIG, a JSON file, is what the rule multinode_run wrote: the program and the attributes of the rule. README.md
is the manual. Python 3.6 is enough, as clusters have old ones.
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any, Dict, List, Tuple

# Beside this file, also where Bazel has put a link to it somewhere else.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

import arguments  # noqa: E402
import batch  # noqa: E402
import script  # noqa: E402
import site_file  # noqa: E402
import staging  # noqa: E402
from batch import say  # noqa: E402
from site_file import Error  # noqa: E402


def _which(program: str) -> str:
    return shutil.which(program) or ""


def _mpirun(site: site_file.Site) -> str:
    mpirun = os.environ.get("LOCKSTEP_MPIRUN", "")
    if not mpirun and not site.modules and not _which("mpirun"):  # a module may bring one
        raise Error("there is no mpirun on PATH: load the module of Open MPI, or set LOCKSTEP_MPIRUN to its path "
                    "(Debian: apt-get install openmpi-bin)")
    # Not the path that it has on PATH: Open MPI takes that for its prefix, and fails where it is /bin.
    return mpirun or "mpirun"


def _pmix() -> str:
    """The kind of srun --mpi that Open MPI understands; empty where Slurm has none."""
    done = subprocess.run(["srun", "--mpi=list"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, universal_newlines=True)
    kinds = re.findall(r"\bpmix(?:_v\d+)?\b", done.stdout)
    return "pmix" if "pmix" in kinds else max(kinds, default="", key=lambda kind: int(kind[6:]))


def _choose_launcher(args: arguments.Arguments, site: site_file.Site) -> Tuple[str, str]:
    """("srun", kind of --mpi) or ("mpirun", "")."""
    wanted = args.launcher if args.launcher != "auto" else site.launcher or "auto"
    if wanted == "mpirun":
        return "mpirun", ""
    mpi = site.mpi or _pmix()
    if mpi:
        return "srun", mpi
    if wanted == "srun":
        say("this Slurm has no PMIx, so MPI will not connect the ranks: right for programs without MPI only")
        return "srun", "none"
    return "mpirun", ""


def _cpus_per_node() -> int:
    """CPUs of this allocation on the node that has least, 0 if Slurm does not tell: 4(x2),2 are 2."""
    text = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")
    counts = [int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", text)]
    return min(counts, default=0)


def _check_allocation(args: arguments.Arguments, site: site_file.Site) -> None:
    """What is more than the allocation, srun would wait for without an end."""
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or args.nodes)
    cpus = _cpus_per_node()
    wanted = args.ranks_per_node * max(1, args.cpus_per_rank)
    hint = "; this is enough: " + script.command_text(["salloc"] + script.allocation_words(args, site), " ")
    if nodes < args.nodes:
        raise Error("this allocation has %d node%s, and %d are wanted (--nodes)%s" %
                    (nodes, "s" if nodes > 1 else "", args.nodes, hint))
    if cpus and cpus < wanted:
        raise Error("this allocation has %d CPU%s on a node, and %d are wanted (--ranks_per_node, --cpus_per_rank)%s" %
                    (cpus, "s" if cpus > 1 else "", wanted, hint))


def _local_environment() -> Dict[str, str]:
    """For an mpirun that stays on this host, whatever batch system there is."""
    values = {
        "OMPI_MCA_plm": "isolated",
        "OMPI_MCA_ras": "^slurm,tm,gridengine,lsf,alps",
        # No reading of another process's memory: containers often forbid it.
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        "OMPI_MCA_smsc": "^cma",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    if os.geteuid() == 0:
        values.update({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    return {name: value for name, value in values.items() if name not in os.environ}


def _execute(text: str) -> int:
    """Becomes the script: what signals do, it decides."""
    sys.stdout.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and so would the ranks
        signal.signal(number, signal.SIG_DFL)
    with tempfile.TemporaryFile() as f:
        f.write(text.encode())
        f.flush()
        f.seek(0)
        os.set_inheritable(f.fileno(), True)
        os.execv("/bin/bash", ["bash", "/dev/fd/%d" % f.fileno()])


class Run:
    """One command line."""

    def __init__(self, config: Dict[str, Any], runfiles: str, words: List[str]):
        self.config = config
        self.args = arguments.parse(words, config)
        self.folder = os.environ.get("BUILD_WORKING_DIRECTORY") or os.getcwd()
        site = self.args.site
        self.site = site_file.read(os.path.join(self.folder, os.path.expanduser(site)) if site else None)
        self.runfiles = runfiles

    def _program(self, root: str) -> script.Program:
        return script.Program(self.config["label"], self.config["name"], root, self.config["binary"],
                              os.path.dirname(self.config["job"]))

    def _staged(self) -> script.Program:
        files = staging.Files(self.runfiles, self.config["files"])
        if self.args.dry_run:
            root = staging.place(self.site.stage_directory, self.config["name"], files)
            print("# stage: %d files, %.1f MB, to %s" % (len(files.sources), files.bytes / 1e6, root))
        else:
            root = staging.stage(self.site.stage_directory, self.config["name"], files)
        return self._program(root)

    def _script(self, program: script.Program, launcher: str, mpi: str, batch_job: bool) -> str:
        values = script.environment(self.args, self.site, program, launcher, self.folder)
        runs = os.path.join(self.site.stage_directory, "runs")
        if launcher == "srun":
            launch = script.srun_words(self.args, mpi)
        else:
            if os.geteuid() == 0:
                values.update({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
            forwarded = list(values) + ["LOCKSTEP_RUN", "LOCKSTEP_RESTARTS", "LOCKSTEP_STARTED_AT"]
            launch = script.mpirun_words(self.args, _mpirun(self.site), forwarded, local=False)
        return script.job_script(self.args, self.site, program, launch, values, runs, self.folder, batch_job)

    def _shape(self) -> str:
        args = self.args
        return "%d node%s with %d rank%s each" % (args.nodes, "s" if args.nodes > 1 else "", args.ranks_per_node,
                                                  "s" if args.ranks_per_node > 1 else "")

    def submit(self) -> int:
        if not _which("sbatch"):
            raise Error("there is no sbatch on PATH to submit with: is this a machine of the cluster?")
        launcher, mpi = _choose_launcher(self.args, self.site)
        program = self._staged()
        text = self._script(program, launcher, mpi, batch_job=True)
        words = script.sbatch_words(self.args, self.site, program, launcher)
        if self.args.dry_run:
            print("cd %s &&" % script.command_text([self.folder]))
            print(script.command_text(words) + " <<'END_OF_SCRIPT'\n" + text + "END_OF_SCRIPT")
            return 0
        os.chdir(self.folder)
        say("submitting %s, by %s" % (self._shape(), "srun --mpi=" + mpi if launcher == "srun" else "mpirun"))
        return batch.run(words, text, os.path.join(self.folder, program.name + "-%j.out"), self.args.detach)

    def in_allocation(self) -> int:
        _check_allocation(self.args, self.site)
        launcher, mpi = _choose_launcher(self.args, self.site)
        text = self._script(self._staged(), launcher, mpi, batch_job=False)
        return self._run("%s of allocation %s, by %s" % (self._shape(), os.environ["SLURM_JOB_ID"],
                                                         "srun --mpi=" + mpi if launcher == "srun" else "mpirun"), text)

    def over_ssh(self) -> int:
        text = self._script(self._staged(), "mpirun", "", batch_job=False)
        return self._run("%d ranks on each of %s, by mpirun over ssh" %
                         (self.args.ranks_per_node, ", ".join(self.args.hosts)), text)

    def local(self, why: str) -> int:
        program = self._program(self.runfiles)
        values = script.environment(self.args, self.site, program, "mpirun", self.folder)
        values.pop("OMP_NUM_THREADS", None)  # of a node's cores, not of this host's
        values["LOCKSTEP_RANKS_PER_NODE"] = str(self.args.ranks)
        values.update(_local_environment())
        values.update(self.site.environment)
        launch = script.mpirun_words(self.args, _mpirun(self.site), [], local=True)
        text = script.job_script(self.args, self.site, program, launch, values, tempfile.gettempdir(), self.folder,
                                 batch=False)
        return self._run("%s%d ranks on this host, by mpirun, in the place of %s" % (why, self.args.ranks, self._shape()),
                         text)

    def _run(self, what: str, text: str) -> int:
        if self.args.dry_run:
            print(text, end="")
            return 0
        say(what)
        return _execute(text)

    def run(self) -> int:
        args = self.args
        if args.help:
            print(arguments.HELP.format(**self.config), end="")
            return 0
        if args.submit:
            return self.submit()
        if args.hosts:
            return self.over_ssh()
        if args.local:
            return self.local("")
        if os.environ.get("SLURM_JOB_ID") and _which("srun"):
            return self.in_allocation()
        if _which("sbatch"):
            raise Error("this is no allocation of Slurm: add --submit, or --local for a run on this host, or get one:\n  " +
                        script.command_text(["salloc"] + script.allocation_words(args, self.site) +
                                            (["--time=" + args.time_limit] if args.time_limit else []) +
                                            self.site.slurm_options, "    "))
        return self.local("there is no Slurm here: ")


def main() -> int:
    runfiles, config_path = sys.argv[1:3]
    with open(config_path, encoding="utf-8") as f:
        config = json.load(f)
    try:
        return Run(config, runfiles, sys.argv[3:]).run()
    except Error as error:
        print("multinode_run: %s" % error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
