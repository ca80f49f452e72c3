"""The flags of multinode_run, which stand before or between those of the program."""
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from site_file import Error

HELP = """{label}: {binary_label} on {nodes} x {ranks_per_node} ranks.

In an allocation of Slurm (salloc) the ranks start there, by srun or mpirun. Elsewhere, where there is
Slurm, --submit makes a batch job of it. Without Slurm the same number of ranks runs on this host.

  --submit              submit a batch job, show its output, cancel it when interrupted
  --detach              submit a batch job, print its number and leave
  --local               run all ranks on this host
  --hosts=a,b           run on these hosts, by mpirun over ssh
  --dry_run             print what would run, and run nothing
  --site=FILE           settings of this cluster (default: ~/.config/lockstep/site.conf)
  --launcher={launcher:<10} auto, srun or mpirun
  --nodes={nodes:<13} nodes
  --ranks_per_node={ranks_per_node:<4} ranks on each node
  --gpus_per_rank={gpus_per_rank:<5} GPUs for each rank
  --cpus_per_rank={cpus_per_rank:<5} CPUs for each rank; 0: as Slurm gives
  --time={time_limit:<14} of a batch job, as in 30 (minutes), 1:30:00 or 2-00:00:00
  --max_restarts=0      start again where the program ends with status 75: saved and stopped
  --log_ranks=0,1|all   show the output of these ranks only, each line after its rank
  --log_dir=DIR         write the output of each rank to DIR/rank3.out and DIR/rank3.err

All other arguments are the program's; after -- all are. bazel run {binary_label} -- --help shows its flags.
"""


class Arguments(NamedTuple):
    submit: bool
    detach: bool
    local: bool
    dry_run: bool
    help: bool
    hosts: List[str]
    site: Optional[str]
    launcher: str
    nodes: int
    ranks_per_node: int
    gpus_per_rank: int
    cpus_per_rank: int
    time_limit: str
    max_restarts: int
    log_ranks: str
    log_dir: str
    program: List[str]

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


_SWITCHES = ("submit", "detach", "local", "dry_run", "help")
_COUNTS = {"nodes": 1, "ranks_per_node": 1, "gpus_per_rank": 0, "cpus_per_rank": 0, "max_restarts": 0}  # least
_TEXTS = ("hosts", "site", "launcher", "time", "log_ranks", "log_dir")


def seconds_of(time_limit: str) -> int:
    """Seconds of a time as Slurm writes it. 0: no limit."""
    match = re.match(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})$", time_limit)
    if not match:
        raise Error("--time=%s: give minutes, hours:minutes:seconds or days-hours:minutes:seconds" % time_limit)
    parts = [int(part) for part in match.group("parts").split(":")]
    if match.group("days") is not None:
        hours, minutes, seconds = parts + [0] * (3 - len(parts))
        return ((int(match.group("days")) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 3:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


def _split(words: List[str]) -> Tuple[Dict[str, Any], List[str]]:
    """Takes our flags out of the command line; the rest is the program's."""
    found, rest, i = {}, [], 0
    while i < len(words):
        word = words[i]
        i += 1
        if word == "--":
            return found, rest + words[i:]
        name, equals, value = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        if name in _SWITCHES and not equals:
            found[name] = True
        elif name in _SWITCHES:
            raise Error("--%s takes no value" % name)
        elif name in _COUNTS or name in _TEXTS:
            if not equals:
                if i == len(words):
                    raise Error("--%s needs a value" % name)
                value = words[i]
                i += 1
            found[name] = value
        else:
            rest.append(word)
    return found, rest


def parse(words: List[str], defaults: Dict[str, Any]) -> Arguments:
    """`defaults`: the attributes of the rule."""
    found, program = _split(words)
    for name in list(_COUNTS):
        text = str(found.get(name, defaults.get(name, 0)))
        if not re.match(r"\d{1,9}$", text) or int(text) < _COUNTS[name]:
            raise Error("--%s=%s: give a whole number from %d up" % (name, text, _COUNTS[name]))
        found[name] = int(text)
    launcher = found.get("launcher", defaults["launcher"])
    if launcher not in ("auto", "srun", "mpirun"):
        raise Error("--launcher=%s: choose auto, srun or mpirun" % launcher)
    time_limit = found.get("time", defaults["time_limit"])
    if time_limit:
        seconds_of(time_limit)
    hosts = found.get("hosts", "").split(",") if "hosts" in found else []
    for host in hosts:
        if not re.match(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*$", host):
            raise Error("--hosts=%s: give names of hosts, as in --hosts=a,b" % found["hosts"])
    if hosts and "nodes" in found and len(hosts) != found["nodes"] and found["nodes"] != defaults["nodes"]:
        raise Error("--hosts names %d hosts, --nodes=%d: leave --nodes out" % (len(hosts), found["nodes"]))
    if hosts:
        found["nodes"] = len(hosts)
    log_ranks = found.get("log_ranks", "")
    if log_ranks and not re.match(r"(all|\d+(,\d+)*)$", log_ranks):
        raise Error("--log_ranks=%s: give ranks, as in --log_ranks=0,1, or all" % log_ranks)
    ways = [name for name in ("submit", "local") if found.get(name)] + (["hosts"] if hosts else [])
    if found.get("detach") and "submit" not in ways:
        ways.append("detach")
    if len(ways) > 1:
        raise Error("--%s and --%s exclude each other" % (ways[0], ways[1]))
    return Arguments(
        submit=bool(found.get("submit") or found.get("detach")),
        detach=bool(found.get("detach")),
        local=bool(found.get("local")),
        dry_run=bool(found.get("dry_run")),
        help=bool(found.get("help")),
        hosts=hosts,
        site=found.get("site"),
        launcher=launcher,
        nodes=found["nodes"],
        ranks_per_node=found["ranks_per_node"],
        gpus_per_rank=found["gpus_per_rank"],
        cpus_per_rank=found["cpus_per_rank"],
        time_limit=time_limit,
        max_restarts=found["max_restarts"],
        log_ranks=log_ranks,
        log_dir=found.get("log_dir", ""),
        program=list(defaults["args"]) + program,
    )
