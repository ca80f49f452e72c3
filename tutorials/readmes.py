"""The commands of the READMEs, and what they say these print. For readme_test and readme_multinode_test."""
import os
import re
import shlex
import subprocess

SOAK = "LOCKSTEP_SOAK" in os.environ
FOLDER = os.environ["TEST_TMPDIR"]  # where the commands are typed; and in the place of /tmp
PROGRAM = re.compile(r"(?:tools/bazel run (//(?:tutorials|tools)[\w/:]*)(?: --(?= ))?|bazel-bin/([\w/]+))([^;|#\n)]*)")
EVERY_RANK_FAILS = ("--data=/nowhere", "--lr=1e30", "--local")
ANY_COMMAND = re.compile(r"\b(tools/bazel run|bazel-bin/|tools/slurm/)")


class Block:
    """An indented part of a README, as its lines; or a command inside its text."""

    def __init__(self, path, title, lines):
        self.path, self.title, self.lines = path, title, lines

    def is_shown(self):
        """Whether it is "$ COMMAND" and what that prints."""
        return self.lines[0].startswith("$ ")

    def is_command(self):
        return not self.is_shown() and any(ANY_COMMAND.search(line) for line in self.lines)


def blocks(path):
    title, block, result, text = "", [], [], []  # text: what is outside of blocks
    with open(path) as f:
        lines = f.read().replace("\\\n", " ").split("\n")
    for line in lines + [""]:
        if line.startswith("    "):
            block.append(line[4:])
            continue
        text.append(line)
        if block:
            result.append(Block(path, title, [each.strip() for each in block]))
            block = []
        if line.startswith("## "):
            title = line[3:]
    inline = [code for code in re.findall(r"`([^`]+)`", "\n".join(text)) if PROGRAM.search(code)]
    return result + [Block(path, "", [" ".join(code.split())]) for code in inline]


def programs():
    """Where the program of each target lies that a README may name, by the aliases of tutorials/BUILD."""
    with open("tutorials/BUILD") as f:
        aliases = re.findall(r'alias\(\s*name = "(\w+)",\s*actual = "//(\S+):(\w+)"', f.read())
    return {"//tutorials:" + name: f"{package}/{target}" for name, package, target in aliases}


PROGRAMS = programs()
PROGRAMS["//tools:consolidate"] = "tools/consolidate/consolidate"


def script(lines, shorter):
    """The lines for bash, with programs in the place of `tools/bazel run`; `shorter(program)` is added to their flags."""
    def replace(match):
        target, program, flags = match.groups()
        program = program or PROGRAMS.get(target) or target[2:].replace(":", "/")
        return " ".join([shlex.quote(os.path.abspath(program)), flags.strip(), *shorter(os.path.basename(program))]) + " "

    text = "\n".join(line[2:] if line.startswith("$ ") else line for line in lines)
    text = re.sub(r"^tools/bazel (build|test|run --config=gpu).*$", "true", text, flags=re.M)
    text = PROGRAM.sub(replace, text.replace("/tmp/", FOLDER + "/"))
    return re.sub(r"^(?=tools/slurm/)", os.getcwd() + "/", text, flags=re.M)


def run(lines, shorter=lambda program: (), before=()):
    """Runs them as one script, which ends when one of them fails; stdout has both outputs."""
    env = dict(os.environ, RUNFILES_DIR=os.environ["TEST_SRCDIR"], SCRATCH=FOLDER, OMPI_ALLOW_RUN_AS_ROOT="1",
               OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return subprocess.run([*before, "bash", "-e", "-o", "pipefail", "-c", script(lines, shorter)], cwd=FOLDER, env=env,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def alike(quoted, printed):
    """Whether two lines are the same but for small differences of numbers, as they depend on the processor a little.

    "..." in a quote stands for a word that varies, such as a time. Which collective it was (#87, [1059850]) is left open.
    """
    quoted, printed = (re.sub(r"#\d+|\[\d+\]", "#N", line).split() for line in (quoted, printed))
    return len(quoted) == len(printed) and all(map(words_alike, quoted, printed))


def missing(block, done):
    """What a block shows, and the run of its commands does not."""
    printed = done.stdout.splitlines()
    result = []
    for line in block.lines:
        line = line.replace("/tmp/", FOLDER + "/")
        candidates = printed
        if any(mistake in block.lines[0] for mistake in EVERY_RANK_FAILS):  # and any may be the first
            line, *candidates = (re.sub(r"\brank \d+", "rank N", each) for each in (line, *printed))
        # A longer line may be quoted in part.
        if not line.startswith("$ ") and not any(line in each or alike(line, each) for each in candidates):
            result.append(line)
    return result


def words_alike(quoted, printed):
    if quoted == "..." or quoted == printed:
        return True
    number = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
    if number.sub("N", quoted) != number.sub("N", printed):
        return False
    return all(a == b or numbers_alike(a, b) for a, b in zip(number.findall(quoted), number.findall(printed)))


def numbers_alike(quoted, printed):
    if "e-" in quoted:  # a rounding error
        return float(printed) <= 10 * float(quoted)
    return "." in quoted + printed and abs(float(quoted) - float(printed)) <= 0.05 * abs(float(quoted)) + 0.01
