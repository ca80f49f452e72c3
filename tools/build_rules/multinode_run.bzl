"""multinode_run: a program on many nodes, by one `bazel run`."""

_ATTRIBUTES = ["nodes", "ranks_per_node", "gpus_per_rank", "cpus_per_rank", "time_limit", "launcher"]

def _runfiles_path(ctx, file):
    # ../repository/x of another repository.
    if file.short_path.startswith("../"):
        return file.short_path[3:]
    return ctx.workspace_name + "/" + file.short_path

def _implementation(ctx):
    for name in ["nodes", "ranks_per_node"]:
        if getattr(ctx.attr, name) < 1:
            fail("%s: give a number from 1 up" % name)
    binary = ctx.attr.binary[DefaultInfo]
    helpers = [ctx.file._job, ctx.file._rank]
    program_files = depset(helpers, transitive = [binary.files, binary.default_runfiles.files]).to_list()
    values = {name: getattr(ctx.attr, name) for name in _ATTRIBUTES}
    config = ctx.actions.declare_file(ctx.label.name + ".multinode.json")
    ctx.actions.write(config, json.encode(dict(
        values,
        args = ctx.attr.program_args,
        binary = _runfiles_path(ctx, ctx.executable.binary),
        binary_label = str(ctx.attr.binary.label).replace("@@//", "//").replace("@//", "//"),
        files = sorted([_runfiles_path(ctx, file) for file in program_files]),
        job = _runfiles_path(ctx, ctx.file._job),
        label = str(ctx.label).replace("@@//", "//").replace("@//", "//"),
        name = ctx.label.name,
    )))
    launcher = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.write(launcher, _LAUNCHER.format(
        main = _runfiles_path(ctx, ctx.file._main),
        config = _runfiles_path(ctx, config),
    ), is_executable = True)
    runfiles = ctx.runfiles(files = [config] + helpers + ctx.files._python)
    return [DefaultInfo(executable = launcher, runfiles = runfiles.merge(binary.default_runfiles).merge(
        ctx.runfiles(transitive_files = binary.files),
    ))]

_LAUNCHER = """#!/bin/bash
# Bazel's runfiles: beside this script, or those of what runs it.
runfiles=$0.runfiles
if [[ ! -d $runfiles ]]; then runfiles=${{RUNFILES_DIR:-${{TEST_SRCDIR:-}}}}; fi
if [[ ! -e $runfiles/{config} ]]; then echo "multinode_run: no runfiles beside $0: start it with bazel run" >&2; exit 2; fi
runfiles=$(cd "$runfiles" && pwd)
exec python3 "$runfiles/{main}" "$runfiles" "$runfiles/{config}" "$@"
"""

_multinode_run = rule(
    implementation = _implementation,
    executable = True,
    attrs = {
        "binary": attr.label(mandatory = True, executable = True, cfg = "target"),
        "cpus_per_rank": attr.int(default = 0),
        "gpus_per_rank": attr.int(default = 0),
        "launcher": attr.string(default = "auto", values = ["auto", "srun", "mpirun"]),
        "nodes": attr.int(default = 2),
        "program_args": attr.string_list(),
        "ranks_per_node": attr.int(default = 1),
        "time_limit": attr.string(),
        "_job": attr.label(default = "//tools/build_rules/multinode:job.sh", allow_single_file = True),
        "_main": attr.label(default = "//tools/build_rules/multinode:multinode_run.py", allow_single_file = True),
        "_python": attr.label(default = "//tools/build_rules/multinode:python"),
        "_rank": attr.label(default = "//tools/build_rules/multinode:rank.sh", allow_single_file = True),
    },
)

def multinode_run(name, binary, args = [], **kwargs):
    """Makes the target NAME, which runs `binary` on many nodes.

    Example:

        load("@lockstep//tools/build_rules:multinode_run.bzl", "multinode_run")

        multinode_run(
            name = "train_multinode",
            binary = ":train",
            nodes = 2,
            ranks_per_node = 4,
            gpus_per_rank = 1,
            cpus_per_rank = 32,
            time_limit = "30",
        )

        $ salloc --nodes=2 --ntasks-per-node=4 ...
        $ bazel run //:train_multinode -- --epochs=3           # in the allocation
        $ bazel run //:train_multinode -- --submit --epochs=3  # as a batch job

    Each attribute but `binary` is the default of a flag of the same name. Accounts, partitions and the like come
    from the site file. tools/build_rules/multinode/README.md is the manual.

    Args:
      name: name of the target.
      binary: any executable target.
      args: arguments for the program, before those of the command line.
      **kwargs: nodes (2), ranks_per_node (1), gpus_per_rank (0), cpus_per_rank (0: as Slurm gives), time_limit
        ("": that of the partition), launcher ("auto", "srun" or "mpirun"; "auto": srun where it has PMIx), and what
        all rules have.
    """
    _multinode_run(name = name, binary = binary, program_args = args, **kwargs)
