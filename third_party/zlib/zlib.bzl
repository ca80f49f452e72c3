"""@zlib//:zlib, from pkg-config or LOCKSTEP_ZLIB_HOME."""

load("//third_party:repo_utils.bzl", "pkg_config_library")

def _impl(ctx):
    pkg_config_library(ctx, "zlib", headers = "z*.h", lib = "-lz", package = "zlib1g-dev", variable = "LOCKSTEP_ZLIB_HOME")

zlib_repository = repository_rule(
    implementation = _impl,
    environ = ["LOCKSTEP_ZLIB_HOME", "PATH", "PKG_CONFIG_PATH"],
    configure = True,  # looked for again by `bazel sync --configure`
    local = True,  # ... and whenever the Bazel server starts
)
