"""@zlib//:zlib, from pkg-config or LOCKSTEP_ZLIB_HOME."""

load("//third_party:repo_utils.bzl", "cc_library_text", "has_header", "link_include_dirs", "run", "split_flags", "unavailable_text", "warn_missing")

def _impl(ctx):
    home = ctx.os.environ.get("LOCKSTEP_ZLIB_HOME", "")
    if home:
        words = ["-I%s/include" % home, "-L%s/lib" % home, "-lz"]
    else:
        # Without a zlib.pc, the compiler's own folders are the last place to look.
        words = run(ctx, ["pkg-config", "--cflags", "--libs", "zlib"]) or ["-lz"]
    flags = split_flags(words)
    if home and not ctx.path(home + "/include/zlib.h").exists:
        fail(("LOCKSTEP_ZLIB_HOME=%s: no include/zlib.h there. Name the prefix that zlib was installed to, " % home) +
             "or unset it to use the system's.")
    if not has_header(ctx, flags.includes, "zlib.h"):
        warn_missing(ctx, "zlib", "zlib1g-dev", "LOCKSTEP_ZLIB_HOME")
        ctx.file("BUILD.bazel", unavailable_text("zlib", "//third_party/zlib:installed"))
        return
    includes = link_include_dirs(ctx, flags.includes)
    rpaths = ["-Wl,-rpath," + d for d in flags.libdirs] if home else []
    ctx.file("BUILD.bazel", cc_library_text("zlib", {
        "hdrs": 'glob(["include*/z*.h"])' if includes else "[]",
        "includes": repr(includes),
        "linkopts": repr(["-L" + d for d in flags.libdirs] + rpaths + flags.libs),
    }))

zlib_repository = repository_rule(
    implementation = _impl,
    environ = ["LOCKSTEP_ZLIB_HOME", "PATH", "PKG_CONFIG_PATH"],
    configure = True,  # looked for again by `bazel sync --configure`
    local = True,  # ... and whenever the Bazel server starts
)
