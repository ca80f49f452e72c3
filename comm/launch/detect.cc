#include "lockstep/comm/launch/detect.h"

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace lockstep::launch {
namespace {

// SLURM_STEP_ID of what is no step of tasks: the shell of sbatch, of salloc, ...
constexpr int64_t kFirstSpecialStep = 0xfffffff0;

std::string Describe(const std::string& name, const std::optional<std::string>& value) {
  return value ? absl::StrCat(name, "=", *value) : absl::StrCat(name, " is not set");
}

// Reads numbers out of an environment and keeps the first error.
class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> Text(const std::string& name) const {
    std::optional<std::string> value = environment_(name);
    return value && value->empty() ? std::nullopt : value;
  }

  bool Has(const std::string& name) const { return Text(name).has_value(); }

  std::optional<int64_t> Optional(const std::string& name,
                                  int64_t limit = std::numeric_limits<int>::max()) {
    std::optional<std::string> text = Text(name);
    if (!text) return std::nullopt;
    int64_t value = 0;
    if (!absl::SimpleAtoi(*text, &value) || value < 0 || value > limit) {
      Fail(absl::StrCat(name, "=", *text, " is not a number from 0 to ", limit));
      return std::nullopt;
    }
    return value;
  }

  // `because` is a variable that is set, and without which `name` would not be needed.
  int Required(const std::string& name, const std::string& because) {
    if (!Has(name)) {
      Fail(absl::StrCat(name, " is not set, but ", Describe(because, Text(because)),
                        ": set both or neither"));
    }
    return static_cast<int>(Optional(name).value_or(0));
  }

  // That `index` < `count`, which are what the two variables say.
  void CheckBelow(const std::string& index, const std::string& count) {
    std::optional<int64_t> i = Optional(index);
    std::optional<int64_t> n = Optional(count);
    if (i && n && *i >= *n) {
      Fail(absl::StrCat(index, "=", *i, " is not below ", count, "=", *n));
    }
  }

  // That `other`, where it is set at all, says the same as `name`.
  void CheckAgrees(const std::string& name, const std::string& other) {
    std::optional<int64_t> value = Optional(name);
    std::optional<int64_t> second = Optional(other);
    if (value && second && *value != *second) {
      Fail(absl::StrCat(
          name, "=", *value, " and ", other, "=", *second,
          " contradict each other: unset the one that is left over from another launch"));
    }
  }

  void Fail(const std::string& message) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat("environment: ", message));
  }

  const absl::Status& status() const { return status_; }

 private:
  const Environment& environment_;
  absl::Status status_;
};

// The first host of Slurm's notation: n[01-03,7],m2 gives n01.
std::string FirstHost(const std::string& hosts) {
  std::string first;
  for (size_t i = 0; i < hosts.size() && hosts[i] != ','; ++i) {
    if (hosts[i] != '[') {
      first += hosts[i];
      continue;
    }
    const size_t close = hosts.find(']', i);
    if (close == std::string::npos) break;
    const std::string range = hosts.substr(i + 1, close - i - 1);
    first += range.substr(0, range.find_first_of(",-"));
    i = close;
  }
  return first;
}

// Tasks of a node in Slurm's notation: 2(x3),1 is 2, 2, 2, 1.
std::optional<int> TasksOfNode(const std::string& counts, int64_t node) {
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(counts, ','))) {
    const std::vector<std::string> pieces = absl::StrSplit(part, absl::ByAnyChar("(x)"));
    int tasks = 0;
    int64_t repeat = 1;
    if (!absl::SimpleAtoi(pieces[0], &tasks)) return std::nullopt;
    if (pieces.size() >= 3 && !absl::SimpleAtoi(pieces[2], &repeat)) return std::nullopt;
    if (node < repeat) return tasks;
    node -= repeat;
  }
  return std::nullopt;
}

std::optional<int> ToInt(const std::optional<int64_t>& value) {
  return value ? std::optional<int>(static_cast<int>(*value)) : std::nullopt;
}

void ReadStoreAddress(Reader& reader, World& world) {
  if (!reader.Has("MASTER_ADDR") && !reader.Has("MASTER_PORT")) return;
  const std::optional<std::string> host = reader.Text("MASTER_ADDR");
  if (!host) reader.Required("MASTER_ADDR", "MASTER_PORT");
  const int port = reader.Required("MASTER_PORT", "MASTER_ADDR");
  if (port > 65535) reader.Fail(absl::StrCat("MASTER_PORT=", port, " is above 65535"));
  world.store = StoreAddress{host.value_or(""), port};
}

World ReadMpirun(Reader& reader) {
  World world;
  world.launcher = Launcher::kMpirun;
  world.rank = reader.Required("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  world.size = reader.Required("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK");
  world.local_rank = reader.Required("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK");
  world.local_size = reader.Required("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK");
  world.node_count = ToInt(reader.Optional("OMPI_MCA_orte_num_nodes"));
  if (!world.node_count && world.local_size == world.size) world.node_count = 1;
  reader.CheckBelow("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  reader.CheckBelow("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  reader.CheckAgrees("OMPI_COMM_WORLD_RANK", "PMIX_RANK");
  reader.CheckAgrees("OMPI_COMM_WORLD_RANK", "RANK");
  reader.CheckAgrees("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE");
  reader.CheckAgrees("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK");
  reader.CheckAgrees("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE");
  ReadStoreAddress(reader, world);
  return world;
}

World ReadTorchrun(Reader& reader) {
  World world;
  world.launcher = Launcher::kTorchrun;
  world.rank =
      reader.Required("RANK", reader.Has("WORLD_SIZE") ? "WORLD_SIZE" : "TORCHELASTIC_RUN_ID");
  world.size = reader.Required("WORLD_SIZE", "RANK");
  world.local_rank = reader.Required("LOCAL_RANK", "RANK");
  world.local_size = ToInt(reader.Optional("LOCAL_WORLD_SIZE"));
  world.node_count = ToInt(reader.Optional("GROUP_WORLD_SIZE"));
  if (!world.node_count && world.local_size == world.size) world.node_count = 1;
  reader.CheckBelow("RANK", "WORLD_SIZE");
  reader.CheckBelow("LOCAL_RANK", "WORLD_SIZE");
  reader.CheckBelow("LOCAL_RANK", "LOCAL_WORLD_SIZE");
  if (!reader.Has("MASTER_ADDR")) reader.Required("MASTER_ADDR", "RANK");
  reader.Required("MASTER_PORT", "RANK");
  ReadStoreAddress(reader, world);
  return world;
}

bool IsSlurmStep(Reader& reader) {
  const std::optional<int64_t> step =
      reader.Optional("SLURM_STEP_ID", std::numeric_limits<uint32_t>::max());
  if (!step || *step >= kFirstSpecialStep || !reader.Has("SLURM_PROCID")) return false;
  const bool interactive =
      reader.Has("SLURM_PTY_PORT") && reader.Optional("SLURM_STEP_NUM_TASKS") == 1;
  return !interactive;
}

World ReadSrun(Reader& reader) {
  const std::string size =
      reader.Has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  World world;
  world.launcher = reader.Has("PMIX_RANK") ? Launcher::kSrunPmix : Launcher::kSrunNoPmix;
  world.rank = reader.Required("SLURM_PROCID", "SLURM_STEP_ID");
  world.size = reader.Required(size, "SLURM_PROCID");
  world.local_rank = reader.Required("SLURM_LOCALID", "SLURM_PROCID");
  world.node_count = ToInt(reader.Optional("SLURM_STEP_NUM_NODES"));
  if (!world.node_count) world.node_count = ToInt(reader.Optional("SLURM_NNODES"));
  const std::optional<std::string> tasks = reader.Text("SLURM_STEP_TASKS_PER_NODE");
  const int64_t node = reader.Optional("SLURM_NODEID").value_or(0);
  world.local_size = tasks ? TasksOfNode(*tasks, node) : std::nullopt;
  reader.CheckBelow("SLURM_PROCID", size);
  reader.CheckBelow("SLURM_LOCALID", size);
  reader.CheckAgrees("SLURM_PROCID", "PMIX_RANK");
  reader.CheckAgrees("SLURM_PROCID", "RANK");
  reader.CheckAgrees(size, "WORLD_SIZE");
  reader.CheckAgrees("SLURM_LOCALID", "LOCAL_RANK");
  ReadStoreAddress(reader, world);
  if (!world.store) {
    std::optional<std::string> hosts = reader.Text("SLURM_STEP_NODELIST");
    if (!hosts) hosts = reader.Text("SLURM_JOB_NODELIST");
    const int64_t job =
        reader.Optional("SLURM_JOB_ID", std::numeric_limits<uint32_t>::max()).value_or(0);
    const int64_t step = *reader.Optional("SLURM_STEP_ID");
    if (hosts) {
      world.store =
          StoreAddress{FirstHost(*hosts), static_cast<int>(20000 + (job + 97 * step) % 10000)};
    }
  }
  return world;
}

}  // namespace

std::string LauncherName(Launcher launcher) {
  switch (launcher) {
    case Launcher::kAlone:
      return "no launcher";
    case Launcher::kMpirun:
      return "mpirun";
    case Launcher::kSrunPmix:
      return "srun with PMIx";
    case Launcher::kSrunNoPmix:
      return "srun without PMIx";
    case Launcher::kTorchrun:
      return "torchrun-style variables";
  }
  return "unknown launcher";
}

std::optional<std::string> ProcessEnvironment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

absl::StatusOr<World> Detect(const Environment& environment) {
  Reader reader(environment);
  World world;
  if (reader.Has("OMPI_COMM_WORLD_RANK") || reader.Has("OMPI_COMM_WORLD_SIZE")) {
    world = ReadMpirun(reader);
  } else if (reader.Has("TORCHELASTIC_RUN_ID")) {
    world = ReadTorchrun(reader);
  } else if (IsSlurmStep(reader)) {
    world = ReadSrun(reader);
  } else if (reader.Has("RANK") || reader.Has("WORLD_SIZE")) {
    world = ReadTorchrun(reader);
  } else {
    // What mpirun of MPICH, Intel MPI and MVAPICH sets, and a PMIx launcher that is not known here.
    for (const std::string name : {"PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MV2_COMM_WORLD_RANK"}) {
      if (!reader.Has(name)) continue;
      reader.Fail(absl::StrCat(Describe(name, reader.Text(name)),
                               ", but neither OMPI_COMM_WORLD_SIZE nor SLURM_STEP_ID is set: start "
                               "the program with mpirun of Open MPI or with srun --mpi=pmix"));
    }
    for (const std::string name : {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
      if (!reader.Has(name)) continue;
      reader.Fail(
          absl::StrCat(Describe(name, reader.Text(name)),
                       ", but neither RANK nor WORLD_SIZE is set: set all of them or none"));
    }
  }
  if (!reader.status().ok()) return reader.status();
  return world;
}

}  // namespace lockstep::launch
