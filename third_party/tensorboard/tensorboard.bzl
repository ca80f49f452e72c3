"""@tensorboard//:python: TensorBoard's Python package from pinned wheels, for tests that read event files.

The wheels are for Python 3.11. With another one the target asks for the constraint
//third_party/tensorboard:installed, and Bazel skips the tests.
"""

load("//third_party:repo_utils.bzl", "unavailable_line", "warn")
load("//third_party:wheels.bzl", "fetch_wheels")

_PYTHON = "Python 3.11."

_PACKAGES = ["absl", "google", "numpy", "numpy.libs", "tensorboard"]

_TARGET = """
filegroup(
    name = "python",
    srcs = {srcs},
    visibility = ["//visibility:public"],
    {compat}
)
"""

def _impl(ctx):
    python = ctx.which("python3")
    version = ctx.execute([python, "--version"]).stdout if python else "none"
    if not version.startswith(_PYTHON):
        warn(ctx, "tests with TensorBoard are skipped: python3 is %s, and the pinned wheels are for 3.11" % version.strip())
        ctx.file("BUILD.bazel", _TARGET.format(srcs = "[]", compat = unavailable_line("//third_party/tensorboard:installed")))
        return
    fetch_wheels(ctx, ctx.attr._requirements, ["absl/*.py", "google/*", "numpy/*", "numpy.libs/*", "tensorboard/*.py"])

    # Folders: a test's sandbox takes them much faster than their thousands of files.
    ctx.file("BUILD.bazel", _TARGET.format(srcs = repr(_PACKAGES), compat = ""))

tensorboard_repository = repository_rule(
    implementation = _impl,
    environ = ["PATH"],
    attrs = {"_requirements": attr.label(default = "//third_party/tensorboard:requirements.txt")},
)
