"""The site file: what a cluster wants to be told, in one place and in no BUILD file.

site.conf.example is a whole one, with all settings.
"""
import configparser
import os
import re
import shlex
from typing import Dict, List, NamedTuple, Optional

DEFAULT_PATH = "~/.config/lockstep/site.conf"


class Error(Exception):
    """A message for the user."""


class Site(NamedTuple):
    slurm: Dict[str, str]  # account, qos, partition, constraint
    slurm_options: List[str]  # of sbatch and salloc, as they are
    interface: str
    modules: List[str]
    launcher: str  # "", srun or mpirun
    mpi: str  # of srun --mpi
    stage_directory: str
    environment: Dict[str, str]


_SETTINGS = {
    "slurm": ["account", "qos", "partition", "constraint", "options"],
    "launch": ["launcher", "mpi"],
    "network": ["interface"],
    "modules": ["load"],
    "stage": ["directory"],
    "environment": None,  # any name
}


def _check(path: str, parser: configparser.ConfigParser) -> None:
    for section in parser.sections():
        if section not in _SETTINGS:
            raise Error("%s: there is no section [%s]; there are %s" %
                        (path, section, ", ".join("[%s]" % name for name in _SETTINGS)))
        known = _SETTINGS[section]
        for name in parser[section]:
            if known is not None and name not in known:
                raise Error("%s: [%s] has no setting %s; it has %s" % (path, section, name, ", ".join(known)))
            if known is None and not re.match(r"[A-Za-z_][A-Za-z0-9_]*$", name):
                raise Error("%s: [environment] %s: that is no name of a variable" % (path, name))
            if "\n" in parser[section][name]:
                raise Error("%s: [%s] %s: the value goes over several lines; put it into one" % (path, section, name))


def read(path: Optional[str]) -> Site:
    """Reads a site file; the default one may be absent."""
    parser = configparser.ConfigParser(interpolation=None, default_section="", delimiters=("=",))
    parser.optionxform = str  # names of variables keep their case
    chosen = os.path.expanduser(path or DEFAULT_PATH)
    if path or os.path.exists(chosen):
        try:
            with open(chosen, encoding="utf-8") as f:
                parser.read_file(f)
        except OSError as error:
            raise Error("%s: %s" % (chosen, error.strerror)) from error
        except (configparser.Error, UnicodeDecodeError) as error:
            raise Error("%s: %s" % (chosen, " ".join(str(error).split()))) from error
    _check(chosen, parser)

    def get(section: str, name: str) -> str:
        return parser.get(section, name, fallback="").strip()

    launcher = get("launch", "launcher")
    if launcher not in ("", "auto", "srun", "mpirun"):
        raise Error("%s: [launch] launcher = %s: choose auto, srun or mpirun" % (chosen, launcher))
    try:
        options = shlex.split(get("slurm", "options"))
    except ValueError as error:
        raise Error("%s: [slurm] options: %s" % (chosen, error)) from error
    names = ("account", "qos", "partition", "constraint")
    return Site(
        slurm={name: get("slurm", name) for name in names if get("slurm", name)},
        slurm_options=options,
        interface=get("network", "interface"),
        modules=get("modules", "load").split(),
        launcher="" if launcher == "auto" else launcher,
        mpi=get("launch", "mpi"),
        stage_directory=os.path.expandvars(os.path.expanduser(get("stage", "directory") or "~/.cache/lockstep/stage")),
        environment=dict(parser["environment"]) if parser.has_section("environment") else {},
    )
