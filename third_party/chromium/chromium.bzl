"""@chromium//:browser: a program that tests of pages start, headless, as external/chromium/headless.

From LOCKSTEP_CHROMIUM or the first of Chromium's usual names on PATH. Where there is none, it asks for
the constraint //third_party/chromium:installed, and Bazel skips the tests.
"""

load("//third_party:repo_utils.bzl", "unavailable_line", "warn_missing")

_TARGET = """
sh_library(
    name = "browser",
    srcs = [{srcs}],
    visibility = ["//visibility:public"],
    {compat}
)
"""

_NAMES = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"]

def _impl(ctx):
    path = ctx.os.environ.get("LOCKSTEP_CHROMIUM", "")
    if path and not ctx.path(path).exists:
        fail("LOCKSTEP_CHROMIUM=%s: no program is there. Name one, or unset it to look on PATH." % path)
    for name in _NAMES:
        path = path or str(ctx.which(name) or "")
    if not path:
        warn_missing(ctx, "Chromium", "chromium-headless-shell", "LOCKSTEP_CHROMIUM")
        ctx.file("BUILD.bazel", _TARGET.format(srcs = "", compat = unavailable_line("//third_party/chromium:installed")))
        return
    ctx.file("headless", "#!/bin/sh\nexec '%s' \"$@\"\n" % path)
    ctx.file("BUILD.bazel", _TARGET.format(srcs = '"headless"', compat = ""))

chromium_repository = repository_rule(
    implementation = _impl,
    environ = ["LOCKSTEP_CHROMIUM", "PATH"],
    configure = True,  # looked for again by `bazel sync --configure`
    local = True,  # ... and whenever the Bazel server starts
)
