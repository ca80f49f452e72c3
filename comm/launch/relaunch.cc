#include "lockstep/comm/launch/relaunch.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "lockstep/comm/launch/detect.h"
#include "lockstep/comm/launch/supervise.h"
#include "lockstep/tools/trace/startup.h"
#include "lockstep_openmpi/mpirun_path.h"

extern char** environ;

namespace lockstep::launch {
namespace {

constexpr int kMaxDefaultRanks = 4;
constexpr int kMaxRanksPerCore = 32;  // more are a slip of the pen, and would drown the machine

// Set in the ranks that we start: which of 1 and 2 are terminals of the user's, and the user's
// TMPDIR.
constexpr char kRelaunched[] = "LOCKSTEP_RELAUNCHED";
constexpr char kTerminals[] = "LOCKSTEP_RELAUNCHED_TERMINALS";
constexpr char kTmpdir[] = "LOCKSTEP_RELAUNCHED_TMPDIR";

using Variables = absl::btree_map<std::string, std::string>;

[[noreturn]] void Die(const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name,
               std::string{status.message()}.c_str());
  std::exit(2);
}

int CoreCount() {
  cpu_set_t cores;
  if (sched_getaffinity(/*pid=*/0, sizeof(cores), &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

struct Arguments {
  std::optional<int> ranks;
  bool help = false;
};

// Reads --ranks and takes it out of argv. A "--" ends the flags.
absl::StatusOr<Arguments> TakeArguments(int& argc, char** argv) {
  Arguments result;
  int kept = 1;
  bool flags = true;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const std::string flag = absl::StartsWith(argument, "--") ? argument.substr(1) : argument;
    if (argument == "--") flags = false;
    if (flags && (absl::StartsWith(flag, "-help") || flag == "-h" || flag == "-version")) {
      result.help = true;
    }
    const bool separate = flag == "-ranks";
    if (!flags || (!separate && !absl::StartsWith(flag, "-ranks="))) {
      argv[kept++] = argv[i];
      continue;
    }
    std::string text = separate ? "" : flag.substr(std::string("-ranks=").size());
    if (separate && i + 1 < argc) text = argv[++i];
    int ranks = 0;
    if (!absl::SimpleAtoi(text, &ranks) || ranks < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--ranks=", text, ": give a number of ranks from 1 up, as in --ranks=2"));
    }
    result.ranks = ranks;
  }
  argv[kept] = nullptr;
  argc = kept;
  return result;
}

bool IsExecutable(const std::string& path) {
  return !path.empty() && std::filesystem::is_regular_file(path) && access(path.c_str(), X_OK) == 0;
}

absl::StatusOr<std::string> FindMpirun(const std::string& option) {
  const std::string chosen =
      !option.empty() ? option : ProcessEnvironment("LOCKSTEP_MPIRUN").value_or("");
  if (!chosen.empty()) {
    if (IsExecutable(chosen)) return chosen;
    return absl::NotFoundError(absl::StrCat(
        "no program ", chosen,
        " to start ranks with: ", option.empty() ? "LOCKSTEP_MPIRUN" : "RelaunchOptions::mpirun",
        " must be the path of mpirun"));
  }
  if (IsExecutable(kMpirunPath)) return std::string(kMpirunPath);
  const std::string path = ProcessEnvironment("PATH").value_or("");
  for (const std::string& folder : std::vector<std::string>(absl::StrSplit(path, ':'))) {
    const std::string candidate = absl::StrCat(folder.empty() ? "." : folder, "/mpirun");
    if (IsExecutable(candidate)) return candidate;
  }
  return absl::NotFoundError(
      "no mpirun on PATH to start ranks with: install Open MPI (Debian: openmpi-bin), set "
      "LOCKSTEP_MPIRUN to the path of mpirun, or run on one rank with --ranks=1");
}

// argv[0] where it is a path, so that runfiles are found beside it; else the file that runs.
std::string ProgramPath(const char* argv0) {
  std::error_code error;
  if (absl::StrContains(argv0, "/")) {
    const std::filesystem::path path = std::filesystem::absolute(argv0, error);
    if (!error && IsExecutable(path)) return path;
  }
  const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? std::string(argv0) : path.string();
}

Variables ProcessVariables() {
  Variables variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::pair<std::string, std::string> pair =
        absl::StrSplit(*entry, absl::MaxSplits('=', 1));
    variables.insert(pair);
  }
  return variables;
}

// Makes a new folder that only this user reads; empty where that fails.
std::string MakeFolder(const std::string& parent) {
  std::string name = absl::StrCat(parent, "/lockstep.XXXXXX");
  return mkdtemp(name.data()) == nullptr ? "" : name;
}

absl::StatusOr<Command> MpirunCommand(const std::string& mpirun, int ranks, int argc, char** argv) {
  Command command;
  Variables variables = ProcessVariables();
  // Open MPI puts sockets below TMPDIR, whose paths must be short: hence not below the user's.
  const std::string folder = MakeFolder("/tmp");
  if (folder.empty())
    return absl::UnavailableError("cannot make a folder in /tmp to start ranks with");
  command.scratch.push_back(folder);
  if (auto tmpdir = variables.find("TMPDIR"); tmpdir != variables.end()) {
    variables[kTmpdir] = tmpdir->second;
  }
  variables["TMPDIR"] = folder;
  variables.emplace("HOME", folder);  // Open MPI 5 and later do not start without one
  const std::string shared_memory = MakeFolder("/dev/shm");
  if (!shared_memory.empty()) {
    command.scratch.push_back(shared_memory);
    variables.insert({"OMPI_MCA_btl_vader_backing_directory", shared_memory});  // Open MPI 4
    variables.insert({"OMPI_MCA_btl_sm_backing_directory", shared_memory});     // and later
  }
  variables[kRelaunched] = "1";
  variables.insert({"LOCKSTEP_STARTED_AT",
                    absl::StrFormat("%.6f", absl::ToUnixMicros(trace::ProcessStart()) * 1e-6)});
  variables[kTerminals] = absl::StrCat(isatty(1) ? "1" : "", isatty(2) ? "2" : "");

  const int cores = CoreCount();
  variables.insert({"OMP_NUM_THREADS", absl::StrCat(std::max(1, cores / ranks))});
  if (ranks > cores) variables.insert({"OMPI_MCA_mpi_yield_when_idle", "1"});
  // One host, also inside an allocation of a batch system: no ssh, no srun.
  variables.insert({"OMPI_MCA_plm", "isolated"});
  variables.insert({"OMPI_MCA_ras", "^slurm,tm,gridengine,lsf,alps"});
  // No reading of another process's memory: containers often forbid it.
  variables.insert({"OMPI_MCA_btl_vader_single_copy_mechanism", "none"});
  variables.insert({"OMPI_MCA_smsc", "^cma"});
  if (geteuid() == 0) {
    variables.insert({"OMPI_ALLOW_RUN_AS_ROOT", "1"});
    variables.insert({"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"});
  }
  for (const auto& [name, value] : variables) {
    command.environment.push_back(absl::StrCat(name, "=", value));
  }
  command.arguments = {mpirun, "--map-by", ":OVERSUBSCRIBE",    "--bind-to",
                       "none", "-n",       absl::StrCat(ranks), ProgramPath(argv[0])};
  command.arguments.insert(command.arguments.end(), argv + 1, argv + argc);
  return command;
}

// In a rank that we started: undoes what was for mpirun alone.
void PrepareRank() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // mpirun killed by SIGKILL ends no ranks itself
  const std::optional<std::string> tmpdir = ProcessEnvironment(kTmpdir);
  if (tmpdir) {
    setenv("TMPDIR", tmpdir->c_str(), /*overwrite=*/1);
  } else {
    unsetenv("TMPDIR");
  }
}

}  // namespace

void RelaunchIfAlone(int& argc, char** argv, const RelaunchOptions& options) {
  absl::StatusOr<Arguments> arguments = TakeArguments(argc, argv);
  if (!arguments.ok()) Die(arguments.status());
  absl::StatusOr<World> world = Detect();
  if (!world.ok()) Die(world.status());
  const bool relaunched = ProcessEnvironment(kRelaunched).has_value();

  if (world->launcher != Launcher::kAlone) {
    if (arguments->ranks && *arguments->ranks != world->size) {
      Die(absl::InvalidArgumentError(absl::StrCat("--ranks=", *arguments->ranks, ", but ",
                                                  LauncherName(world->launcher), " started ",
                                                  world->size, " ranks: leave --ranks out")));
    }
    if (relaunched) PrepareRank();
    std::setvbuf(stdout, /*buf=*/nullptr, _IOLBF, BUFSIZ);
    return;
  }
  if (relaunched) {
    Die(absl::FailedPreconditionError(
        "mpirun started this rank without OMPI_COMM_WORLD_RANK: it is not that of Open MPI; set "
        "LOCKSTEP_MPIRUN to the path of one that is"));
  }
  int default_ranks =
      options.default_ranks > 0 ? options.default_ranks : std::min(CoreCount(), kMaxDefaultRanks);
  if (!arguments->ranks && options.most_default_ranks != nullptr) {
    default_ranks = std::min(default_ranks, std::max(1, options.most_default_ranks()));
  }
  const int ranks = arguments->ranks.value_or(default_ranks);
  if (ranks == 1 || arguments->help) return;
  if (arguments->ranks && options.check_ranks != nullptr) {
    if (absl::Status status = options.check_ranks(ranks); !status.ok()) Die(status);
  }
  if (ranks > kMaxRanksPerCore * CoreCount()) {
    Die(absl::InvalidArgumentError(
        absl::StrCat("--ranks=", ranks, ": at most ", kMaxRanksPerCore * CoreCount(),
                     " ranks are started on this host's cores (", CoreCount(), ")")));
  }

  absl::StatusOr<std::string> mpirun = FindMpirun(options.mpirun);
  if (!mpirun.ok()) Die(mpirun.status());
  absl::StatusOr<Command> command = MpirunCommand(*mpirun, ranks, argc, argv);
  if (!command.ok()) Die(command.status());
  std::fflush(nullptr);
  std::exit(Supervise(*command));
}

bool IsTerminal(int fd) {
  const std::optional<std::string> terminals = ProcessEnvironment(kTerminals);
  if (!terminals) return isatty(fd) != 0;
  return absl::StrContains(*terminals, absl::StrCat(fd));
}

}  // namespace lockstep::launch
