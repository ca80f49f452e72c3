"""What runs: a shell script, and the command line of sbatch, as texts that --dry_run prints."""
import os
import shlex
from typing import Dict, List, NamedTuple

from arguments import Arguments, seconds_of
from site_file import Site

_SECONDS_TO_SAVE = 120  # between SIGTERM and the end of a batch job's time, or a quarter of its time


class Program(NamedTuple):
    label: str
    name: str
    root: str  # of the runfiles, as seen by the nodes
    path: str  # of the executable, below root
    helpers: str  # the folder of job.sh and rank.sh, below root


def command_text(words: List[str], indent: str = "  ") -> str:
    """A command line for a shell; a long one has each flag in a line of its own."""
    quoted = [shlex.quote(word) for word in words]
    if len(words) <= 7:
        return " ".join(quoted)
    lines = [quoted[0]]
    for word in quoted[1:]:
        if word.startswith(("-", "'-")):
            lines.append(word)
        else:
            lines[-1] += " " + word
    return (" \\\n" + indent).join(lines)


def environment(args: Arguments, site: Site, program: Program, launcher: str, folder: str) -> Dict[str, str]:
    """What the ranks find in their environment because of us. The site's word is the last."""
    values = {"RUNFILES_DIR": program.root, "LOCKSTEP_RANKS_PER_NODE": str(args.ranks_per_node)}
    if args.cpus_per_rank:
        values["OMP_NUM_THREADS"] = str(args.cpus_per_rank)
    if args.log_ranks:
        values["LOCKSTEP_LOG_RANKS"] = args.log_ranks
    if args.log_dir:
        values["LOCKSTEP_LOG_DIR"] = os.path.join(folder, args.log_dir)
        values["LOCKSTEP_FLIGHT_DIR"] = values["LOCKSTEP_LOG_DIR"]
    if launcher == "srun":
        # Barriers of Slurm's PMIx plugin wait for no other node where TreeWidth, 50 by default, exceeds
        # the nodes of the step (seen in 22.05): MPI_Init then crashes now and then.
        values["SLURM_PMIX_FENCE"] = "ring"
    if site.interface:
        values["NCCL_SOCKET_IFNAME"] = site.interface
        values["OMPI_MCA_btl_tcp_if_include"] = site.interface
        values["OMPI_MCA_oob_tcp_if_include"] = site.interface
    values.update(site.environment)
    return values


def srun_words(args: Arguments, mpi: str) -> List[str]:
    words = ["srun", "--kill-on-bad-exit=1", "--mpi=" + mpi, "--input=none", "--nodes=%d" % args.nodes,
             "--ntasks=%d" % args.ranks, "--ntasks-per-node=%d" % args.ranks_per_node]
    if args.cpus_per_rank:
        words += ["--cpus-per-task=%d" % args.cpus_per_rank, "--cpu-bind=cores"]
    if args.gpus_per_rank:
        # Each rank sees the GPUs of all on its node and takes that of its local rank: GPUs reach each
        # other's memory only where both are visible.
        words += ["--gpus-per-node=%d" % (args.gpus_per_rank * args.ranks_per_node), "--gpu-bind=none"]
    return words


def mpirun_words(args: Arguments, mpirun: str, forwarded: List[str], local: bool) -> List[str]:
    words = [mpirun, "-n", str(args.ranks)]
    if local:
        return words + ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    if args.hosts:
        words += ["--host", ",".join("%s:%d" % (host, args.ranks_per_node) for host in args.hosts)]
    if args.cpus_per_rank:
        words += ["--map-by", "ppr:%d:node:PE=%d" % (args.ranks_per_node, args.cpus_per_rank), "--bind-to", "core"]
    else:
        words += ["--map-by", "ppr:%d:node" % args.ranks_per_node, "--bind-to", "none"]
    for name in forwarded:
        words += ["-x", name]
    return words


def _load_modules(modules: List[str]) -> List[str]:
    return [
        "if ! type module >/dev/null 2>&1; then",
        "  for init in \"${MODULESHOME:-}/init/bash\" \"${LMOD_PKG:-}/init/bash\" /etc/profile.d/modules.sh \\",
        "    /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh; do",
        "    if [[ -r $init ]]; then . \"$init\"; break; fi",
        "  done",
        "fi",
        "module load %s || exit 1" % " ".join(shlex.quote(module) for module in modules),
    ]


def job_script(args: Arguments, site: Site, program: Program, launch: List[str], values: Dict[str, str], runs: str,
               folder: str, batch: bool) -> str:
    """The script that runs in the allocation, or on this host."""
    helpers = os.path.join(program.root, program.helpers)
    lines = ["#!/bin/bash",
             "# %s: %d x %d ranks" % (program.label, args.nodes, args.ranks_per_node),
             "cd %s || exit 1" % shlex.quote(folder)]
    if site.modules:
        lines += _load_modules(site.modules)
    lines += ["export %s=%s" % (name, shlex.quote(value)) for name, value in values.items()]
    if args.log_dir:
        lines.append('mkdir -p "$LOCKSTEP_LOG_DIR" || exit 1')
    if batch:
        lines.append("touch %s  # in use" % shlex.quote(program.root))
    job = [os.path.join(helpers, "job.sh"), program.name, runs, str(args.ranks), str(args.max_restarts)]
    rank = [os.path.join(helpers, "rank.sh"), os.path.join(program.root, program.path)] + args.program
    prefix = "LOCKSTEP_BATCH=1 exec " if batch else "exec "
    lines.append(prefix + " \\\n  ".join([command_text(job), command_text(launch, "    "), command_text(rank, "    ")]))
    return "\n".join(lines) + "\n"


def sbatch_words(args: Arguments, site: Site, program: Program, launcher: str) -> List[str]:
    words = ["sbatch", "--parsable", "--job-name=" + program.name, "--output=%s-%%j.out" % program.name,
             "--open-mode=append"] + allocation_words(args, site)
    if args.time_limit:
        words.append("--time=" + args.time_limit)
    seconds = seconds_of(args.time_limit) if args.time_limit else 0
    # To the ranks, or to job.sh, which tells mpirun.
    number = "TERM" if launcher == "srun" else "B:USR1"
    words.append("--signal=%s@%d" % (number, min(_SECONDS_TO_SAVE, seconds // 4) if seconds else _SECONDS_TO_SAVE))
    words.append("--requeue" if args.max_restarts else "--no-requeue")
    return words + site.slurm_options


def allocation_words(args: Arguments, site: Site) -> List[str]:
    """The size of the job, for sbatch and salloc."""
    words = ["--nodes=%d" % args.nodes, "--ntasks-per-node=%d" % args.ranks_per_node]
    if args.cpus_per_rank:
        words.append("--cpus-per-task=%d" % args.cpus_per_rank)
    if args.gpus_per_rank:
        words.append("--gpus-per-node=%d" % (args.gpus_per_rank * args.ranks_per_node))
    return words + ["--%s=%s" % (name, value) for name, value in site.slurm.items()]
