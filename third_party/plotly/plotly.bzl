"""@plotly//:plotly.min.js, from LOCKSTEP_PLOTLY_JS (a file of version 3) or the pinned wheel."""

load("//third_party:wheels.bzl", "fetch_wheels")

def _impl(ctx):
    path = ctx.os.environ.get("LOCKSTEP_PLOTLY_JS", "")
    if not path:
        fetch_wheels(ctx, ctx.attr._requirements, ["plotly/package_data/plotly.min.js"])
        path = str(ctx.path("plotly/package_data/plotly.min.js"))
    elif not ctx.path(path).exists:
        fail("LOCKSTEP_PLOTLY_JS=%s: no file is there. Name a plotly.min.js, or unset it to use the pinned wheel." % path)
    ctx.symlink(path, "plotly.min.js")
    ctx.file("BUILD.bazel", 'exports_files(["plotly.min.js"])\n')

plotly_repository = repository_rule(
    implementation = _impl,
    environ = ["LOCKSTEP_PLOTLY_JS"],
    attrs = {"_requirements": attr.label(default = "//third_party/plotly:requirements.txt")},
)
