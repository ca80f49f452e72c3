#include "lockstep/comm/nccl/nccl_communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "lockstep/comm/nccl/device_claim.h"
#include "lockstep/comm/nccl/group.h"
#include "lockstep/comm/nccl/watchdog.h"
#include "lockstep/comm/nccl/world.h"

namespace lockstep::comm::nccl {
namespace {

// A rank's part in a Split: whether it gives a color, the color, the key.
constexpr int64_t kVoteSize = 3;

class NcclCommunicator : public Communicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<Group> group)
      : Communicator(group->rank, group->size(), group->world->library->device(), group->name,
                     group->world->flight_recorder),
        group_(std::move(group)) {}

  absl::StatusOr<std::unique_ptr<Communicator>> Split(std::optional<int> color, int key) override;

  void StartAfter(const Work& work) override { group_->StartAfter(work); }

  void Abort(absl::Status reason) override {
    World& world = *group_->world;
    const absl::Status here = absl::AbortedError(
        absl::StrCat("aborted by rank ", world.rank, ": ", std::string{reason.message()}));
    world.BreakEverywhere(here, reason);
  }

  Store& store() override { return *group_->world->users_store; }

  Work Issue(Operation operation) override { return group_->Issue(std::move(operation)); }

 private:
  // What the ranks ask for, by rank.
  absl::StatusOr<std::vector<int>> ExchangeVotes(const std::string& name, std::optional<int> color,
                                                 int key);

  const std::shared_ptr<Group> group_;
};

absl::StatusOr<std::vector<int>> NcclCommunicator::ExchangeVotes(const std::string& name,
                                                                 std::optional<int> color,
                                                                 int key) {
  const std::vector<int> mine = {color ? 1 : 0, color.value_or(0), key};
  const at::Tensor all = Empty({kVoteSize * size()}, at::kInt);
  const Work work = AllGatherInto(all, at::tensor(mine, at::kInt).to(device()), "split");
  absl::Status status = work.Wait();
  if (auto state = std::dynamic_pointer_cast<State>(work.state());
      status.ok() && state != nullptr) {
    status = state->WaitOnHost();
  }
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("Split of communicator ", this->name(), " into ", name, ": ",
                                     std::string{status.message()}));
  }
  const at::Tensor votes = all.cpu();
  const int* data = votes.const_data_ptr<int>();
  return std::vector<int>(data, data + votes.numel());
}

absl::StatusOr<std::unique_ptr<Communicator>> NcclCommunicator::Split(std::optional<int> color,
                                                                      int key) {
  World& world = *group_->world;
  if (world.is_broken()) return world.BrokenStatus();
  const absl::Time deadline = absl::Now() + world.options.deadline;
  std::string name;
  {
    std::lock_guard<std::mutex> lock(group_->mutex);
    name = absl::StrCat(this->name(), "/", ++group_->splits);
  }
  absl::StatusOr<std::vector<int>> votes = ExchangeVotes(name, color, key);
  if (!votes.ok()) return votes.status();
  std::set<int> colors;
  std::vector<std::pair<int, int>> members;  // (key, rank) of my color
  for (int i = 0; i < size(); ++i) {
    const int* vote = votes->data() + kVoteSize * i;
    if (vote[0] == 0) continue;
    colors.insert(vote[1]);
    if (color && vote[1] == *color) members.push_back({vote[2], i});
  }
  std::sort(members.begin(), members.end());
  // NCCL wants colors from 0 up, and its order of equal keys is not said to be ours.
  const int place =
      color ? static_cast<int>(std::distance(colors.begin(), colors.find(*color))) : -1;
  std::vector<int> world_ranks;
  int new_rank = 0;
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i].second == rank()) new_rank = static_cast<int>(i);
    world_ranks.push_back(group_->world_ranks[members[i].second]);
  }
  absl::StatusOr<std::shared_ptr<Lane>> lane = group_->SplitLane(place, new_rank, deadline);
  if (!lane.ok()) {
    absl::Status status = lane.status();
    if (world.is_broken()) return world.BrokenStatus();
    status =
        absl::Status(status.code(), absl::StrCat("Split of communicator ", this->name(), " into ",
                                                 name, " on rank ", rank(), " of ", size(),
                                                 status.message().empty() ? " does not end" : ": ",
                                                 std::string{status.message()}));
    world.BreakEverywhere(status);
    return world.BrokenStatus();
  }
  if (!color) return std::unique_ptr<Communicator>();
  if (colors.size() > 1) absl::StrAppend(&name, ".", *color);
  auto group = std::make_shared<Group>(group_->world, *lane, name, new_rank, world_ranks);
  JoinControlPlane(*group);
  return std::make_unique<NcclCommunicator>(std::move(group));
}

// The ranks that have not said in the store that they are here.
std::string Missing(Store& store, int size) {
  std::vector<int> missing;
  for (int i = 0; i < size; ++i) {
    auto here = store.TryGet(absl::StrCat("here/", i));
    if (!here.ok() || !here->has_value()) missing.push_back(i);
  }
  if (missing.empty()) {
    return "all ranks have come, but NCCL does not connect them; can they reach each other? "
           "NCCL_DEBUG=INFO shows what it tries";
  }
  return absl::StrCat("waiting for rank ", absl::StrJoin(missing, ", "));
}

absl::StatusOr<UniqueId> AgreeOnId(World& world, const Handle::Stop& stop) {
  UniqueId id{};
  if (world.rank == 0) {
    if (const Result result = world.library->GetUniqueId(&id); result != Result::kSuccess) {
      return absl::InternalError(absl::StrCat("NCCL: ", world.library->ErrorString(result), ": ",
                                              world.library->LastError(nullptr)));
    }
    absl::Status status = world.store->Set("id", std::string(id.data(), id.size()));
    if (!status.ok()) return status;
    return id;
  }
  absl::Duration pause = absl::Milliseconds(1);
  for (;;) {
    if (absl::Status status = stop(); !status.ok()) return status;
    absl::StatusOr<std::optional<std::string>> text = world.store->TryGet("id");
    if (!text.ok()) return text.status();
    if (text->has_value() && (*text)->size() == id.size()) {
      std::copy((*text)->begin(), (*text)->end(), id.begin());
      return id;
    }
    absl::SleepFor(pause);
    pause = std::min(pause * 2, absl::Milliseconds(100));
  }
}

absl::Status Connect(World& world, Handle& handle, int size) {
  const Handle::Stop stop = world.StopAt(absl::Now() + world.options.deadline);
  absl::Status status = world.store->Set(absl::StrCat("here/", world.rank), "here");
  if (status.ok()) status = ClaimDevice(*world.library, *world.store, world.rank);
  if (!status.ok()) return status;
  absl::StatusOr<UniqueId> id = AgreeOnId(world, stop);
  status = id.ok() ? handle.Init(*id, size, world.rank, stop) : id.status();
  if (status.ok() || world.is_broken()) return status;
  const std::string who =
      absl::StrCat("NCCL communicator of ", size, " ranks, on rank ", world.rank, ": ");
  if (absl::IsDeadlineExceeded(status) && status.message().empty()) {
    return absl::DeadlineExceededError(absl::StrCat(who, "not made after ",
                                                    absl::FormatDuration(world.options.deadline),
                                                    ": ", Missing(*world.store, size)));
  }
  return absl::Status(status.code(), absl::StrCat(who, std::string{status.message()}));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateOn(std::shared_ptr<Library> library,
                                                       const Store& store, int rank, int size,
                                                       const Options& options) {
  auto world = std::make_shared<World>();
  world->library = std::move(library);
  world->store = store.WithPrefix("lockstep/");
  world->users_store = store.WithPrefix("user/");
  world->options = options;
  // Longer ones overflow the clock's nanoseconds.
  world->options.deadline = std::min(options.deadline, absl::Hours(24 * 365));
  world->rank = rank;
  world->plane = std::make_unique<ControlPlane>(
      world->store, rank, ControlPlane::Options{.interval = options.control_interval});
  std::vector<int> world_ranks(size);
  std::iota(world_ranks.begin(), world_ranks.end(), 0);
  absl::StatusOr<std::shared_ptr<Lane>> lane = Lane::Open(world);
  if (!lane.ok()) {
    world->BreakEverywhere(lane.status());
    return world->BrokenStatus();
  }
  auto group = std::make_shared<Group>(world, *lane, "world", rank, std::move(world_ranks));
  JoinControlPlane(*group);
  StartWatchdog(world);
  absl::Status status = (*lane)->Run([&] { return Connect(*world, (*lane)->handle(), size); });
  if (status.ok()) return std::make_unique<NcclCommunicator>(std::move(group));
  world->BreakEverywhere(status);
  return world->BrokenStatus();
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateOn(std::shared_ptr<Library> library,
                                                       Communicator& other,
                                                       const Options& options) {
  // Several may be made of one communicator, by all its ranks in one order.
  const std::string prefix = absl::StrCat("nccl/", other.name(), "/");
  absl::StatusOr<int64_t> count = other.store().Add(absl::StrCat(prefix, other.rank()), 1);
  if (!count.ok()) return count.status();
  return CreateOn(std::move(library), *other.store().WithPrefix(absl::StrCat(prefix, *count, "/")),
                  other.rank(), other.size(), options);
}

}  // namespace lockstep::comm::nccl
