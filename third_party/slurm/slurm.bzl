"""@slurm//:local_cluster: a dependency of tests that bring up tools/slurm/local_cluster.

Where Slurm is not installed, or this user may make no namespaces, it asks for the constraint
//third_party/slurm:installed, and Bazel skips the tests.
"""

load("//third_party:repo_utils.bzl", "unavailable_line", "warn")

_TARGET = """
sh_library(
    name = "local_cluster",
    visibility = ["//visibility:public"],
    {compat}
)
"""

_TOOLS = ["munged", "slurmctld", "slurmd", "srun", "sbatch", "ip", "unshare"]

def _why_not(ctx):
    for tool in _TOOLS:
        if not ctx.which(tool) and not ctx.path("/usr/sbin/" + tool).exists:
            return ("%s is not installed (Debian, Ubuntu: apt-get install slurmctld slurmd slurm-client munge " % tool +
                    "iproute2; then run `bazel shutdown`)")
    if ctx.execute(["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"]).return_code != 0:
        return "it needs root, to make namespaces"
    return None

def _impl(ctx):
    why_not = _why_not(ctx)
    if why_not:
        warn(ctx, "tests on a local Slurm cluster are skipped: " + why_not)
    compat = unavailable_line("//third_party/slurm:installed") if why_not else ""
    ctx.file("BUILD.bazel", _TARGET.format(compat = compat))

slurm_repository = repository_rule(
    implementation = _impl,
    environ = ["PATH"],
    configure = True,  # looked for again by `bazel sync --configure`
    local = True,  # ... and whenever the Bazel server starts
)
