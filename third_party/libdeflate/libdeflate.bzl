"""@libdeflate//:libdeflate, from pkg-config or LOCKSTEP_LIBDEFLATE_HOME."""

load("//third_party:repo_utils.bzl", "pkg_config_library")

def _impl(ctx):
    pkg_config_library(ctx, "libdeflate", headers = "libdeflate.h", lib = "-ldeflate", package = "libdeflate-dev", variable = "LOCKSTEP_LIBDEFLATE_HOME")

libdeflate_repository = repository_rule(
    implementation = _impl,
    environ = ["LOCKSTEP_LIBDEFLATE_HOME", "PATH", "PKG_CONFIG_PATH"],
    configure = True,  # looked for again by `bazel sync --configure`
    local = True,  # ... and whenever the Bazel server starts
)
