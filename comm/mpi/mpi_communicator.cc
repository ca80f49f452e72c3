#include "lockstep/comm/mpi/mpi_communicator.h"

#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/comm/mpi/adopt.h"
#include "lockstep/comm/mpi/engine.h"
#include "lockstep/comm/mpi/mpi_status.h"
#include "lockstep/comm/mpi/node.h"
#include "lockstep/comm/mpi/rendezvous.h"
#include "lockstep/comm/mpi/runtime.h"
#include "lockstep/comm/mpi/shared_empty.h"

namespace lockstep::comm::mpi {
namespace {

// A rank's part in a Split.
struct Vote {
  int has_color = 0;
  int color = 0;
  int key = 0;
};

class MpiCommunicator : public Communicator {
 public:
  explicit MpiCommunicator(std::shared_ptr<Group> group)
      : Communicator(group->rank, group->size, at::Device(at::kCPU), group->name,
                     group->world->flight_recorder),
        group_(std::move(group)) {}

  absl::StatusOr<std::unique_ptr<Communicator>> Split(std::optional<int> color, int key) override;

  void StartAfter(const Work& work) override { Engine::Get().StartAfter(group_, work); }

  void Abort(absl::Status reason) override {
    World& world = *group_->world;
    const absl::Status here = absl::AbortedError(
        absl::StrCat("aborted by rank ", world.rank, ": ", std::string{reason.message()}));
    if (Engine::Get().Break(world, here)) world.plane->Abort(reason);
  }

  at::Tensor Empty(at::IntArrayRef sizes, at::ScalarType dtype) override {
    const bool shares = group_->shared != nullptr;
    const at::Tensor shared = shares ? SharedEmpty(*ProcessArena(), sizes, dtype) : at::Tensor();
    return shared.defined() ? shared : Communicator::Empty(sizes, dtype);
  }

  Store& store() override { return *group_->world->users_store; }

  Work Issue(Operation operation) override {
    return Engine::Get().Issue(group_, std::move(operation));
  }

 private:
  absl::StatusOr<std::vector<Vote>> ExchangeVotes(const std::string& name, const Vote& mine);
  absl::Status MissingFrom(const std::string& split);

  const std::shared_ptr<Group> group_;
};

// Makes the MPI communicators of `group` from one that is ours. Needs the token.
absl::Status SetUp(Group& group, MPI_Comm comm) {
  group.comm = comm;
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN));
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_dup(comm, &group.internal));
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_rank(comm, &group.rank));
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_size(comm, &group.size));
  return absl::OkStatus();
}

// Needs the token.
absl::Status ShareMemory(Group& group) {
  std::vector<char*> bases;
  for (int rank : group.world_ranks) bases.push_back(group.world->arenas[rank]);
  absl::StatusOr<std::unique_ptr<SharedGroup>> shared = MakeSharedGroup(group.internal, bases);
  if (shared.ok()) group.shared = *std::move(shared);
  return shared.status();
}

void JoinControlPlane(Group& group) {
  group.control = group.world->plane->Join(
      group.name, group.world_ranks,
      [weak = std::weak_ptr<World>(group.world)](const absl::Status& reason) {
        if (std::shared_ptr<World> world = weak.lock()) Engine::Get().Break(*world, reason);
      });
}

absl::StatusOr<std::vector<Vote>> MpiCommunicator::ExchangeVotes(const std::string& name,
                                                                 const Vote& mine) {
  World& world = *group_->world;
  // For who asks why the split does not end.
  if (absl::Status status = world.store->Set(absl::StrCat("split/", name, "/", rank()), "here");
      !status.ok()) {
    return status;
  }
  std::vector<Vote> votes(size());
  votes[rank()] = mine;
  MPI_Request request = MPI_REQUEST_NULL;
  absl::Status status = Engine::Get().WithToken([&] {
    return LOCKSTEP_MPI_STATUS(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, votes.data(), sizeof(Vote),
                                              MPI_BYTE, group_->internal, &request));
  });
  if (status.ok()) status = Engine::Get().Complete(world, request, world.options.deadline);
  if (status.ok()) return votes;
  static auto* left_to_mpi = new std::vector<std::vector<Vote>>;  // it may still write there
  left_to_mpi->push_back(std::move(votes));
  if (absl::IsDeadlineExceeded(status)) status = MissingFrom(name);
  return status;
}

absl::Status MpiCommunicator::MissingFrom(const std::string& split) {
  World& world = *group_->world;
  std::vector<int> missing;
  for (int i = 0; i < size(); ++i) {
    auto here = world.store->TryGet(absl::StrCat("split/", split, "/", i));
    if (!here.ok() || !here->has_value()) missing.push_back(i);
  }
  return absl::DeadlineExceededError(
      absl::StrCat("Split of communicator ", name(), " into ", split, " on rank ", rank(), " of ",
                   size(), " is not done after ", absl::FormatDuration(world.options.deadline),
                   ": waiting for rank ", absl::StrJoin(missing, ", ")));
}

absl::StatusOr<std::unique_ptr<Communicator>> MpiCommunicator::Split(std::optional<int> color,
                                                                     int key) {
  Engine& engine = Engine::Get();
  if (absl::Status broken = engine.BrokenStatus(*group_->world); !broken.ok()) return broken;
  std::string name = absl::StrCat(this->name(), "/", engine.NextSplit(*group_));
  const Vote mine = {color ? 1 : 0, color.value_or(0), key};
  absl::StatusOr<std::vector<Vote>> votes = ExchangeVotes(name, mine);
  if (!votes.ok()) {
    engine.BreakEverywhere(*group_->world, votes.status());
    return votes.status();
  }
  std::set<int> colors;
  std::vector<std::pair<int, int>> members;  // (key, rank) of my color
  for (int i = 0; i < size(); ++i) {
    const Vote& vote = (*votes)[i];
    if (vote.has_color != 0) colors.insert(vote.color);
    if (color && vote.has_color != 0 && vote.color == *color) members.push_back({vote.key, i});
  }
  std::sort(members.begin(), members.end());
  // MPI wants colors from 0 up.
  const int place =
      color ? static_cast<int>(std::distance(colors.begin(), colors.find(*color))) : MPI_UNDEFINED;
  auto group = std::make_shared<Group>();
  group->world = group_->world;
  group->name = colors.size() > 1 && color ? absl::StrCat(name, ".", *color) : name;
  for (const auto& [member_key, member] : members) {
    group->world_ranks.push_back(group_->world_ranks[member]);
  }
  absl::Status status = engine.WithToken([&]() -> absl::Status {
    MPI_Comm comm = MPI_COMM_NULL;
    // Not of group_->comm, where operations may still wait for their turn.
    LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_split(group_->internal, place, key, &comm));
    if (!color) return absl::OkStatus();
    if (absl::Status s = SetUp(*group, comm); !s.ok()) return s;
    return ShareMemory(*group);
  });
  if (!status.ok()) {
    engine.BreakEverywhere(*group_->world, status);
    return status;
  }
  if (!color) return std::unique_ptr<Communicator>();
  JoinControlPlane(*group);
  return std::make_unique<MpiCommunicator>(std::move(group));
}

bool MoreRanksThanCores(MPI_Comm comm) {
  MPI_Comm node = MPI_COMM_NULL;
  int ranks = 1;
  cpu_set_t cores;
  if (MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, /*key=*/0, MPI_INFO_NULL, &node) !=
          MPI_SUCCESS ||
      MPI_Comm_size(node, &ranks) != MPI_SUCCESS || MPI_Comm_free(&node) != MPI_SUCCESS ||
      sched_getaffinity(/*pid=*/0, sizeof(cores), &cores) != 0) {
    return true;
  }
  return ranks > CPU_COUNT(&cores);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> Adopt(MPI_Comm comm, const Options& options) {
  if (absl::Status status = CheckMpi(); !status.ok()) return status;
  if (options.max_elements_per_call < 1 ||
      options.max_elements_per_call > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("Options::max_elements_per_call is ",
                                                   options.max_elements_per_call,
                                                   ": it must be from 1 to 2^31 - 1"));
  }
  Engine& engine = Engine::Get();
  auto world = std::make_shared<World>();
  auto group = std::make_shared<Group>();
  world->options = options;
  // Longer ones overflow the clock's nanoseconds.
  world->options.deadline = std::min(options.deadline, absl::Hours(24 * 365));
  group->world = world;
  group->name = "world";
  absl::Status status = engine.WithToken([&]() -> absl::Status {
    MPI_Comm ours = MPI_COMM_NULL;
    LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_dup(comm, &ours));
    if (absl::Status s = SetUp(*group, ours); !s.ok()) return s;
    engine.set_oversubscribed(MoreRanksThanCores(ours));
    absl::StatusOr<std::shared_ptr<Store>> store = MeetAtStore(group->internal);
    if (!store.ok()) return store.status();
    world->store = (*store)->WithPrefix("lockstep/");
    world->users_store = (*store)->WithPrefix("user/");
    group->world_ranks.resize(group->size);
    std::iota(group->world_ranks.begin(), group->world_ranks.end(), 0);
    world->arenas.resize(group->size);
    if (!options.shared_memory) return absl::OkStatus();
    absl::StatusOr<std::vector<char*>> arenas = ShareArenas(group->internal);
    if (!arenas.ok()) return arenas.status();
    world->arenas = *std::move(arenas);
    return ShareMemory(*group);
  });
  if (!status.ok()) return status;
  world->rank = group->rank;
  world->plane = std::make_unique<ControlPlane>(world->store, world->rank);
  JoinControlPlane(*group);
  engine.AddWorld(world);
  return std::make_unique<MpiCommunicator>(std::move(group));
}

absl::StatusOr<std::unique_ptr<Communicator>> Create(const launch::World& world,
                                                     const Options& options) {
  if (world.launcher == launch::Launcher::kTorchrun ||
      world.launcher == launch::Launcher::kSrunNoPmix) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks started by ", launch::LauncherName(world.launcher),
                     " have no MPI, which would come up as rank 0 of 1 in each: start them with "
                     "mpirun, or with srun "
                     "--mpi=pmix"));
  }
  if (absl::Status status = InitializeMpi(); !status.ok()) return status;
  int rank = 0;
  int size = 0;
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_size(MPI_COMM_WORLD, &size));
  if (rank != world.rank || size != world.size) {
    return absl::FailedPreconditionError(
        absl::StrCat("MPI came up as rank ", rank, " of ", size, ", but this is rank ", world.rank,
                     " of ", world.size, " by ", launch::LauncherName(world.launcher),
                     ": is the mpirun or srun that started it that of the MPI it is linked with?"));
  }
  return Adopt(MPI_COMM_WORLD, options);
}

}  // namespace lockstep::comm::mpi
