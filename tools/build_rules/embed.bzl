"""Files inside a program, so that it needs none beside it."""

def embed_files(name, files, **kwargs):
    """A cc_library with the bytes of files: `extern "C" const char SYMBOL[], SYMBOL_end[];`.

    Args:
      name: of the library.
      files: label -> symbol.
      **kwargs: of the cc_library.
    """
    commands = ["echo '.section .rodata'"]
    for label, symbol in files.items():
        commands.append(
            "echo '.global {0}; {0}: .incbin \"$(execpath {1})\"; .global {0}_end; {0}_end:'".format(symbol, label),
        )

    # Bazel drops from the assembler's inputs what no #include names: the digest tells it of a change.
    commands.append("echo \"/* $$(cat $(SRCS) | sha256sum | cut -d' ' -f1) */\"")
    commands.append("echo '.section .note.GNU-stack,\"\",%progbits'")
    native.genrule(
        name = name + "_assembly",
        srcs = files.keys(),
        outs = [name + ".S"],
        cmd = "(" + "; ".join(commands) + ") > $@",
    )
    native.cc_library(
        name = name,
        srcs = [name + ".S"],
        textual_hdrs = files.keys(),  # what the assembler reads
        **kwargs
    )
