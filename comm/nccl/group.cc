#include "lockstep/comm/nccl/group.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/comm/nccl/launch.h"

namespace lockstep::comm::nccl {
namespace {

// The watchdog's deadline comes first: it knows which ranks are missing. But it may wait for us.
absl::Time LastMoment(const World& world, const State& state) {
  return absl::Now() - state.age() + world.options.deadline + absl::Seconds(10);
}

}  // namespace

// Done when the work is, and its failure has broken this world; a work of this backend stands in a
// stream before that.
class Group::Fence {
 public:
  explicit Fence(const std::shared_ptr<WorkState>& work)
      : ours_(std::dynamic_pointer_cast<State>(work)) {}

  void SetDone() {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }

  bool IsDone() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }

  // Makes `stream` wait, or the host where it must.
  absl::Status Await(const World& world, Stream stream) {
    while (!IsDone() && !world.is_broken()) {
      if (ours_ != nullptr && ours_->started()) {
        return world.library->WaitEvent(stream, ours_->event());
      }
      if (ours_ != nullptr && !ours_->IsDone()) {
        ours_->AwaitStarted(absl::Milliseconds(50));
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, std::chrono::milliseconds(50), [this] { return done_; });
    }
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<State> ours_;  // null where it is another backend's
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

Group::Group(std::shared_ptr<World> world, std::shared_ptr<Lane> lane, std::string name, int rank,
             std::vector<int> world_ranks)
    : world(std::move(world)),
      lane(std::move(lane)),
      name(std::move(name)),
      rank(rank),
      world_ranks(std::move(world_ranks)) {
  this->world->AddGroup();
}

Group::~Group() {
  for (auto& [key, channel] : channels_) channel->Close();
  lane->Close();
  control.reset();
  world->RemoveGroup();
}

std::string Group::Describe(const Operation& operation) const {
  return absl::StrCat(operation.ToString(), " of communicator ", name, " on rank ", rank, " of ",
                      size());
}

Work Group::Issue(Operation operation) {
  if (world->is_broken()) return Work(world->BrokenStatus());
  std::shared_ptr<State> state;
  absl::Status status;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (operation.kind == OperationKind::kBarrier && !scratch_.defined()) {
      scratch_ = at::zeros({1}, at::TensorOptions(at::kInt).device(world->library->device()));
    }
    operation.sequence = IsCollective(operation.kind) ? ++collectives_ : ++transfers_;
    control->Issued(operation);
    state = std::make_shared<State>(shared_from_this(), std::move(operation));
    status = state->prepared();
    if (status.ok()) {
      if (absl::Status broken = world->AddPending(state); !broken.ok()) return Work(broken);
      status = Enqueue(state);
    }
  }
  if (!status.ok()) {
    world->BreakEverywhere(status);
    state->Fail(world->BrokenStatus());  // where it is not among the pending ones
  }
  return Work(std::move(state));
}

void Group::StartAfter(const Work& work) {
  auto fence = std::make_shared<Fence>(work.state());
  {
    std::lock_guard<std::mutex> lock(mutex);
    fences_.push_back(fence);
  }
  work.state()->OnDone([fence, world = world](const absl::Status& status) {
    if (!status.ok()) world->BreakEverywhere(status);
    fence->SetDone();
  });
}

absl::Status Group::Enqueue(const std::shared_ptr<State>& state) {
  fences_.erase(std::remove_if(fences_.begin(), fences_.end(),
                               [](const auto& fence) { return fence->IsDone(); }),
                fences_.end());
  const Operation operation = state->operation();
  const auto group = shared_from_this();
  if (IsCollective(operation.kind)) {
    lane->Push([group, state, fences = fences_] {
      return group->StartError(*state, group->StartCollective(*state, fences));
    });
    return absl::OkStatus();
  }
  if (operation.peer == rank) return EnqueueToSelf(state);
  const bool sends = operation.kind == OperationKind::kSend;
  absl::StatusOr<std::shared_ptr<Lane>> channel =
      ChannelOf(sends ? ChannelKey{rank, operation.peer, operation.tag}
                      : ChannelKey{operation.peer, rank, operation.tag});
  if (!channel.ok()) return channel.status();
  (*channel)->Push([group, state, fences = fences_, channel = channel->get()] {
    return group->StartError(*state, group->StartTransfer(*channel, *state, fences));
  });
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Lane>> Group::ChannelOf(const ChannelKey& key) {
  if (const auto found = channels_.find(key); found != channels_.end()) return found->second;
  absl::StatusOr<std::shared_ptr<Lane>> channel = Lane::Open(world);
  if (!channel.ok()) return channel.status();
  channels_[key] = *channel;
  if (std::get<0>(key) == std::get<1>(key)) return channel;  // a stream is all that it needs
  (*channel)->Push([group = shared_from_this(), key, channel = channel->get()] {
    return group->Connect(key, *channel);
  });
  return channel;
}

absl::Status Group::EnqueueToSelf(const std::shared_ptr<State>& state) {
  const Operation operation = state->operation();
  std::deque<std::shared_ptr<State>>& others = to_self_[operation.tag];
  if (others.empty() || others.front()->operation().kind == operation.kind) {
    others.push_back(state);
    return absl::OkStatus();
  }
  const std::shared_ptr<State> other = std::move(others.front());
  others.pop_front();
  const bool sends = operation.kind == OperationKind::kSend;
  const std::shared_ptr<State>& send = sends ? state : other;
  const std::shared_ptr<State>& recv = sends ? other : state;
  const Operation from = send->operation();
  const Operation to = recv->operation();
  if (from.input.scalar_type() != to.output.scalar_type() ||
      from.input.numel() != to.output.numel()) {
    return absl::FailedPreconditionError(absl::StrCat("in communicator ", name, " rank ", rank,
                                                      " issued ", from.ToString(), " and ",
                                                      to.ToString()));
  }
  absl::StatusOr<std::shared_ptr<Lane>> channel = ChannelOf({rank, rank, operation.tag});
  if (!channel.ok()) return channel.status();
  (*channel)->Push(
      [group = shared_from_this(), send, recv, fences = fences_, channel = channel->get()] {
        return group->StartError(*recv, group->CopyToSelf(*channel, *send, *recv, fences));
      });
  return absl::OkStatus();
}

absl::Status Group::StartError(State& state, const absl::Status& status) {
  if (status.ok()) return status;
  if (world->is_broken()) return world->BrokenStatus();
  const std::string what = Describe(state.operation());
  if (absl::IsDeadlineExceeded(status) && status.message().empty()) {
    return absl::DeadlineExceededError(absl::StrCat(
        what, " could not be started in ", absl::FormatDuration(world->options.deadline),
        ": NCCL is still connecting to the ranks; can they reach each other? "
        "NCCL_DEBUG=INFO shows what it tries"));
  }
  return absl::Status(status.code(), absl::StrCat(what, ": ", std::string{status.message()}));
}

absl::Status Group::WaitForInputs(Stream stream, State& state, const Fences& fences) {
  if (absl::Status status = world->library->WaitEvent(stream, state.event()); !status.ok()) {
    return status;
  }
  for (const auto& fence : fences) {
    if (absl::Status status = fence->Await(*world, stream); !status.ok()) return status;
  }
  return world->BrokenStatus();
}

absl::Status Group::StartCollective(State& state, const Fences& fences) {
  const Operation operation = state.operation();
  if (world->detail) {
    absl::Status same = control->CheckSame(operation, world->options.deadline);
    if (!same.ok()) return same;
  }
  Handle& handle = lane->handle();
  absl::Status status = WaitForInputs(handle.stream(), state, fences);
  if (!status.ok()) return status;
  status = LaunchCollective(handle, operation, rank, size(), scratch_,
                            world->StopAt(LastMoment(*world, state)));
  return status.ok() ? state.Started(handle) : status;
}

absl::Status Group::StartTransfer(const Lane& channel, State& state, const Fences& fences) {
  const Operation operation = state.operation();
  Handle& handle = channel.handle();
  absl::Status status = WaitForInputs(handle.stream(), state, fences);
  if (!status.ok()) return status;
  // The source is rank 0 of the two.
  const int peer = operation.kind == OperationKind::kSend ? 1 : 0;
  status = LaunchTransfer(handle, operation, peer, world->StopAt(LastMoment(*world, state)));
  return status.ok() ? state.Started(handle) : status;
}

absl::Status Group::CopyToSelf(const Lane& channel, State& send, State& recv,
                               const Fences& fences) {
  const Handle& handle = channel.handle();
  for (State* each : {&send, &recv}) {
    absl::Status status = WaitForInputs(handle.stream(), *each, fences);
    if (!status.ok()) return status;
  }
  const Operation from = send.operation();
  const Operation to = recv.operation();
  absl::Status status =
      world->library->Copy(to.output.mutable_data_ptr(), from.input.const_data_ptr(),
                           from.input.nbytes(), handle.stream());
  for (State* each : {&send, &recv}) {
    if (status.ok()) status = each->Started(handle);
  }
  return status;
}

absl::Status Group::Connect(const ChannelKey& key, Lane& channel) {
  absl::StatusOr<UniqueId> id = AgreeOnId(key);
  if (!id.ok()) return id.status();
  // The watchdog knows how long the operations that wait for it may take.
  const bool is_source = std::get<0>(key) == rank;
  absl::Status status = channel.handle().Init(*id, /*size=*/2, is_source ? 0 : 1,
                                              world->StopAt(absl::InfiniteFuture()));
  if (status.ok() || world->is_broken()) return status;
  const auto& [source, destination, tag] = key;
  return absl::Status(status.code(), absl::StrCat("rank ", rank, ", connecting ranks ", source,
                                                  " and ", destination, " of communicator ", name,
                                                  " for a Send: ", std::string{status.message()}));
}

absl::StatusOr<UniqueId> Group::AgreeOnId(const ChannelKey& key) {
  const auto& [source, destination, tag] = key;
  const std::string where = absl::StrCat("channel/", name, "/", source, "/", destination, "/", tag);
  UniqueId id{};
  if (source == rank) {
    if (world->library->GetUniqueId(&id) != Result::kSuccess) {
      return absl::InternalError("NCCL gives no unique id: " + world->library->LastError(nullptr));
    }
    absl::Status status = world->store->Set(where, std::string(id.data(), id.size()));
    if (!status.ok()) return status;
    return id;
  }
  absl::Duration pause = absl::Milliseconds(1);
  while (!world->is_broken()) {
    absl::StatusOr<std::optional<std::string>> text = world->store->TryGet(where);
    if (!text.ok()) return text.status();
    if (text->has_value() && (*text)->size() == id.size()) {
      std::copy((*text)->begin(), (*text)->end(), id.begin());
      return id;
    }
    absl::SleepFor(pause);
    pause = std::min(pause * 2, absl::Milliseconds(100));
  }
  return world->BrokenStatus();
}

absl::StatusOr<std::shared_ptr<Lane>> Group::SplitLane(int color, int key, absl::Time deadline) {
  std::shared_ptr<Lane> part;
  if (color >= 0) {
    absl::StatusOr<std::shared_ptr<Lane>> opened = Lane::Open(world);
    if (!opened.ok()) return opened.status();
    part = *std::move(opened);
  }
  absl::Status status = lane->Run([&] {
    return lane->handle().Split(color, key, part == nullptr ? nullptr : &part->handle(),
                                world->StopAt(deadline));
  });
  if (status.ok()) return part;
  if (part != nullptr) part->Close();
  return status;
}

void JoinControlPlane(Group& group) {
  group.control = group.world->plane->Join(
      group.name, group.world_ranks,
      [weak = std::weak_ptr<World>(group.world)](const absl::Status& reason) {
        if (std::shared_ptr<World> world = weak.lock()) world->Break(reason);
      });
}

}  // namespace lockstep::comm::nccl
