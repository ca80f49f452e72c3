#include "lockstep/comm/launch/detect.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace lockstep::launch {
namespace {

using Variables = std::map<std::string, std::string>;

absl::StatusOr<World> DetectFrom(const Variables& variables) {
  return Detect([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string ErrorFrom(const Variables& variables) {
  const absl::StatusOr<World> world = DetectFrom(variables);
  if (world.ok()) return "OK";
  EXPECT_EQ(world.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string{world.status().message()};
}

Variables With(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

Variables Without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Variables kMpirun = {{"OMPI_COMM_WORLD_RANK", "3"},       {"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                           {"OMPI_MCA_orte_num_nodes", "2"},    {"PMIX_RANK", "3"}};

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"GROUP_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "n1"},
                             {"MASTER_PORT", "29500"}};

// salloc -N2 -n3: what its shell has, and what sbatch's and a task of srun add.
const Variables kSalloc = {{"SLURM_JOB_ID", "10021"},
                           {"SLURM_JOB_NODELIST", "n[01-02]"},
                           {"SLURM_NNODES", "2"},
                           {"SLURM_NTASKS", "3"},
                           {"SLURM_TASKS_PER_NODE", "2,1"}};
const Variables kSbatch =
    With(kSalloc, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "0"}});
const Variables kSrun = With(kSalloc, {{"SLURM_STEP_ID", "1"},
                                       {"SLURM_PROCID", "2"},
                                       {"SLURM_LOCALID", "0"},
                                       {"SLURM_NODEID", "1"},
                                       {"SLURM_STEP_NODELIST", "n[01-02]"},
                                       {"SLURM_STEP_NUM_NODES", "2"},
                                       {"SLURM_STEP_NUM_TASKS", "3"},
                                       {"SLURM_STEP_TASKS_PER_NODE", "2,1"}});

void ExpectWorld(const Variables& variables, Launcher launcher, int rank, int size, int local_rank,
                 std::optional<int> local_size, std::optional<int> node_count,
                 const std::string& store) {
  const absl::StatusOr<World> world = DetectFrom(variables);
  ASSERT_TRUE(world.ok()) << world.status();
  EXPECT_EQ(LauncherName(world->launcher), LauncherName(launcher));
  EXPECT_EQ(world->rank, rank);
  EXPECT_EQ(world->size, size);
  EXPECT_EQ(world->local_rank, local_rank);
  EXPECT_EQ(world->local_size, local_size);
  EXPECT_EQ(world->node_count, node_count);
  const std::string address =
      world->store ? world->store->host + ":" + std::to_string(world->store->port) : "none";
  EXPECT_EQ(address, store);
}

TEST(DetectTest, Alone) {
  ExpectWorld({}, Launcher::kAlone, 0, 1, 0, 1, 1, "none");
  ExpectWorld({{"RANK", ""}}, Launcher::kAlone, 0, 1, 0, 1, 1, "none");
}

TEST(DetectTest, Mpirun) {
  ExpectWorld(kMpirun, Launcher::kMpirun, 3, 4, 1, 2, 2, "none");
  ExpectWorld(With(kMpirun, {{"MASTER_ADDR", "n7"}, {"MASTER_PORT", "1234"}}), Launcher::kMpirun, 3,
              4, 1, 2, 2, "n7:1234");
}

TEST(DetectTest, MpirunOnOneNodeNeedsNoNodeCount) {
  ExpectWorld({{"OMPI_COMM_WORLD_RANK", "1"},
               {"OMPI_COMM_WORLD_SIZE", "2"},
               {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
               {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
              Launcher::kMpirun, 1, 2, 1, 2, 1, "none");
  ExpectWorld(Without(kMpirun, "OMPI_MCA_orte_num_nodes"), Launcher::kMpirun, 3, 4, 1, 2,
              std::nullopt, "none");
}

TEST(DetectTest, MpirunInsideSlurmIgnoresTheStepOfItsDaemons) {
  ExpectWorld(With(kMpirun, With(kSrun, {{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}})),
              Launcher::kMpirun, 3, 4, 1, 2, 2, "none");
}

TEST(DetectTest, Srun) {
  ExpectWorld(With(kSrun, {{"PMIX_RANK", "2"}}), Launcher::kSrunPmix, 2, 3, 0, 1, 2, "n01:20118");
  ExpectWorld(kSrun, Launcher::kSrunNoPmix, 2, 3, 0, 1, 2, "n01:20118");
  ExpectWorld(With(kSrun, {{"MASTER_ADDR", "n9"}, {"MASTER_PORT", "1"}}), Launcher::kSrunNoPmix, 2,
              3, 0, 1, 2, "n9:1");
  ExpectWorld(With(kSrun, {{"SLURM_STEP_TASKS_PER_NODE", "3(x2),1"}, {"SLURM_NODEID", "1"}}),
              Launcher::kSrunNoPmix, 2, 3, 0, 3, 2, "n01:20118");
}

TEST(DetectTest, ShellsOfSlurmAreAlone) {
  ExpectWorld(kSalloc, Launcher::kAlone, 0, 1, 0, 1, 1, "none");
  ExpectWorld(kSbatch, Launcher::kAlone, 0, 1, 0, 1, 1, "none");
  // salloc with LaunchParameters=use_interactive_step, and sbatch of an old Slurm.
  ExpectWorld(With(kSbatch, {{"SLURM_STEP_ID", "4294967290"}}), Launcher::kAlone, 0, 1, 0, 1, 1,
              "none");
  ExpectWorld(With(kSbatch, {{"SLURM_STEP_ID", "4294967294"}}), Launcher::kAlone, 0, 1, 0, 1, 1,
              "none");
  // srun --pty bash
  ExpectWorld(
      With(kSbatch,
           {{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PTY_PORT", "3"}}),
      Launcher::kAlone, 0, 1, 0, 1, 1, "none");
}

TEST(DetectTest, StoreOfSrunIsOnTheFirstHost) {
  for (const auto& [hosts, first] : Variables{{"a", "a"},
                                              {"a,b", "a"},
                                              {"n[7,9]", "n7"},
                                              {"n[001-100]-ib,m", "n001-ib"},
                                              {"rack[2-3]node[10-11]", "rack2node10"}}) {
    const auto world = DetectFrom(With(kSrun, {{"SLURM_STEP_NODELIST", hosts}}));
    ASSERT_TRUE(world.ok()) << world.status();
    EXPECT_EQ(world->store->host, first);
  }
}

TEST(DetectTest, Torchrun) {
  ExpectWorld(kTorchrun, Launcher::kTorchrun, 5, 8, 1, 4, 2, "n1:29500");
  ExpectWorld(Without(Without(kTorchrun, "LOCAL_WORLD_SIZE"), "GROUP_WORLD_SIZE"),
              Launcher::kTorchrun, 5, 8, 1, std::nullopt, std::nullopt, "n1:29500");
  // A torchrun on each node, by srun.
  ExpectWorld(With(kSrun, With(kTorchrun, {{"TORCHELASTIC_RUN_ID", "x"}})), Launcher::kTorchrun, 5,
              8, 1, 4, 2, "n1:29500");
}

TEST(DetectTest, NamesWhatIsMissing) {
  EXPECT_EQ(ErrorFrom({{"RANK", "1"}}),
            "environment: WORLD_SIZE is not set, but RANK=1: set both or neither");
  EXPECT_EQ(ErrorFrom({{"WORLD_SIZE", "2"}}),
            "environment: RANK is not set, but WORLD_SIZE=2: set both or neither");
  EXPECT_EQ(ErrorFrom(Without(kTorchrun, "LOCAL_RANK")),
            "environment: LOCAL_RANK is not set, but RANK=5: set both or neither");
  EXPECT_EQ(ErrorFrom(Without(kTorchrun, "MASTER_ADDR")),
            "environment: MASTER_ADDR is not set, but RANK=5: set both or neither");
  EXPECT_EQ(ErrorFrom(Without(kTorchrun, "MASTER_PORT")),
            "environment: MASTER_PORT is not set, but RANK=5: set both or neither");
  EXPECT_EQ(ErrorFrom(With(kMpirun, {{"MASTER_ADDR", "n7"}})),
            "environment: MASTER_PORT is not set, but MASTER_ADDR=n7: set both or neither");
  EXPECT_EQ(ErrorFrom(Without(kMpirun, "OMPI_COMM_WORLD_SIZE")),
            "environment: OMPI_COMM_WORLD_SIZE is not set, but OMPI_COMM_WORLD_RANK=3: set both or "
            "neither");
  EXPECT_EQ(ErrorFrom(Without(kSrun, "SLURM_LOCALID")),
            "environment: SLURM_LOCALID is not set, but SLURM_PROCID=2: set both or neither");
  EXPECT_EQ(
      ErrorFrom({{"PMIX_RANK", "1"}}),
      "environment: PMIX_RANK=1, but neither OMPI_COMM_WORLD_SIZE nor SLURM_STEP_ID is set: start "
      "the program with mpirun of Open MPI or with srun --mpi=pmix");
}

TEST(DetectTest, NamesLaunchersThatItDoesNotKnow) {
  for (const std::string name : {"PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MV2_COMM_WORLD_RANK"}) {
    EXPECT_EQ(
        ErrorFrom({{name, "1"}}),
        "environment: " + name +
            "=1, but neither OMPI_COMM_WORLD_SIZE nor SLURM_STEP_ID is set: start the program "
            "with mpirun of Open MPI or with srun --mpi=pmix");
  }
  // srun --mpi=pmi2 sets them too.
  ExpectWorld(With(kSrun, {{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}}), Launcher::kSrunNoPmix, 2, 3, 0,
              1, 2, "n01:20118");
  for (const std::string name : {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
    EXPECT_EQ(ErrorFrom({{name, "1"}}), "environment: " + name +
                                            "=1, but neither RANK nor WORLD_SIZE is set: set all "
                                            "of them or none");
  }
}

TEST(DetectTest, NamesContradictions) {
  const std::string advice =
      " contradict each other: unset the one that is left over from another launch";
  EXPECT_EQ(ErrorFrom(With(kMpirun, {{"WORLD_SIZE", "2"}})),
            "environment: OMPI_COMM_WORLD_SIZE=4 and WORLD_SIZE=2" + advice);
  EXPECT_EQ(ErrorFrom(With(kMpirun, {{"RANK", "0"}})),
            "environment: OMPI_COMM_WORLD_RANK=3 and RANK=0" + advice);
  EXPECT_EQ(ErrorFrom(With(kMpirun, {{"PMIX_RANK", "1"}})),
            "environment: OMPI_COMM_WORLD_RANK=3 and PMIX_RANK=1" + advice);
  EXPECT_EQ(ErrorFrom(With(kSrun, {{"RANK", "0"}})),
            "environment: SLURM_PROCID=2 and RANK=0" + advice);
  EXPECT_EQ(ErrorFrom(With(kSrun, {{"WORLD_SIZE", "8"}})),
            "environment: SLURM_STEP_NUM_TASKS=3 and WORLD_SIZE=8" + advice);
  EXPECT_EQ(ErrorFrom(With(kMpirun, {{"LOCAL_RANK", "0"}})),
            "environment: OMPI_COMM_WORLD_LOCAL_RANK=1 and LOCAL_RANK=0" + advice);
  EXPECT_EQ(ErrorFrom(With(kMpirun, {{"LOCAL_WORLD_SIZE", "4"}})),
            "environment: OMPI_COMM_WORLD_LOCAL_SIZE=2 and LOCAL_WORLD_SIZE=4" + advice);
  EXPECT_EQ(ErrorFrom(With(kSrun, {{"LOCAL_RANK", "1"}})),
            "environment: SLURM_LOCALID=0 and LOCAL_RANK=1" + advice);
  EXPECT_EQ(ErrorFrom(With(kTorchrun, {{"RANK", "8"}})),
            "environment: RANK=8 is not below WORLD_SIZE=8");
  EXPECT_EQ(ErrorFrom(With(kTorchrun, {{"LOCAL_RANK", "4"}})),
            "environment: LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4");
}

TEST(DetectTest, NamesWhatIsNoNumber) {
  EXPECT_EQ(ErrorFrom(With(kTorchrun, {{"RANK", "one"}})),
            "environment: RANK=one is not a number from 0 to 2147483647");
  EXPECT_EQ(ErrorFrom(With(kTorchrun, {{"WORLD_SIZE", "-2"}})),
            "environment: WORLD_SIZE=-2 is not a number from 0 to 2147483647");
  EXPECT_EQ(ErrorFrom(With(kTorchrun, {{"MASTER_PORT", "70000"}})),
            "environment: MASTER_PORT=70000 is above 65535");
}

}  // namespace
}  // namespace lockstep::launch
