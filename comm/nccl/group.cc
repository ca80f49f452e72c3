#include "lockstep/comm/nccl/group.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/comm/nccl/launch.h"
#include "lockstep/comm/nccl/watchdog.h"

namespace lockstep::comm::nccl {
namespace {

// The watchdog's deadline comes first: it knows which ranks are missing. But it may wait for us.
absl::Time LastMoment(const World& world, const State& state) {
  return absl::Now() - state.age() + world.options.deadline + absl::Seconds(10);
}

}  // namespace

Group::Group(std::shared_ptr<World> world, std::shared_ptr<Handle> handle, std::string name,
             int rank, std::vector<int> world_ranks)
    : world(std::move(world)),
      handle(std::move(handle)),
      name(std::move(name)),
      rank(rank),
      world_ranks(std::move(world_ranks)) {
  this->world->AddGroup();
}

Group::~Group() {
  for (auto& [key, channel] : channels_) {
    if (channel.handle != nullptr) world->Retire(channel.handle);
  }
  world->Retire(handle);
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
    operation.sequence = IsCollective(operation.kind) ? ++collectives_ : ++transfers_;
    control->Issued(operation);
    state = std::make_shared<State>(shared_from_this(), std::move(operation));
    status = state->prepared();
    if (status.ok()) {
      if (absl::Status broken = world->AddPending(state); !broken.ok()) return Work(broken);
      queue_.push_back({.state = state});
      status = StartQueued();
    }
  }
  if (!status.ok()) {
    world->BreakEverywhere(status);
    state->Fail(world->BrokenStatus());  // where it is not among the pending ones
  }
  return Work(std::move(state));
}

void Group::StartAfter(const Work& work) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto state = std::dynamic_pointer_cast<State>(work.state());
    if (state != nullptr && state->started() && queue_.empty()) {
      fences_.push_back(std::move(state));
    } else {
      queue_.push_back({.after = work});
    }
  }
  // Holds the group: what follows goes on where its communicator has been destroyed meanwhile.
  work.state()->OnDone([group = shared_from_this()](const absl::Status& status) {
    if (!status.ok()) group->world->BreakEverywhere(status);
    group->Drain();
  });
}

void Group::Drain() {
  absl::Status status;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (world->is_broken()) {
      queue_.clear();
    } else {
      status = StartQueued();
    }
  }
  if (!status.ok()) world->BreakEverywhere(status);
}

absl::Status Group::StartQueued() {
  while (!queue_.empty()) {
    Queued& front = queue_.front();
    if (front.after) {
      if (!front.after->IsDone()) return absl::OkStatus();
      queue_.pop_front();
      continue;
    }
    const std::shared_ptr<State> state = std::move(front.state);
    queue_.pop_front();
    if (absl::Status status = Start(state); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Group::Start(const std::shared_ptr<State>& state) {
  const Operation operation = state->operation();
  absl::Status status;
  if (!IsCollective(operation.kind)) {
    status = StartTransfer(state);
  } else {
    if (world->detail) status = control->CheckSame(operation, world->options.deadline);
    if (status.ok()) status = StartCollective(*state);
  }
  if (status.ok() || world->is_broken()) return status;
  if (absl::IsDeadlineExceeded(status) && status.message().empty()) {
    return absl::DeadlineExceededError(
        absl::StrCat(Describe(operation), " could not be started in ",
                     absl::FormatDuration(world->options.deadline),
                     ": NCCL is still connecting to the ranks; can they reach each other? "
                     "NCCL_DEBUG=INFO shows what it tries"));
  }
  return status;
}

absl::Status Group::WaitForInputs(Stream stream, State& state) {
  if (absl::Status status = world->library->WaitEvent(stream, state.event()); !status.ok()) {
    return status;
  }
  fences_.erase(std::remove_if(fences_.begin(), fences_.end(),
                               [](const auto& fence) { return fence->IsDone(); }),
                fences_.end());
  for (const auto& fence : fences_) {
    if (absl::Status status = world->library->WaitEvent(stream, fence->event()); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status Group::StartCollective(State& state) {
  const Operation operation = state.operation();
  if (operation.kind == OperationKind::kBarrier && !scratch_.defined()) {
    scratch_ = at::zeros({1}, at::TensorOptions(at::kInt).device(world->library->device()));
  }
  if (absl::Status status = WaitForInputs(handle->stream(), state); !status.ok()) return status;
  absl::Status status = LaunchCollective(*handle, operation, rank, size(), scratch_,
                                         world->StopAt(LastMoment(*world, state)));
  return status.ok() ? state.Started(handle->stream()) : status;
}

absl::Status Group::StartTransfer(const std::shared_ptr<State>& state) {
  const Operation operation = state->operation();
  if (operation.peer == rank) return CopyToSelf(state);
  const bool sends = operation.kind == OperationKind::kSend;
  const ChannelKey key = sends ? ChannelKey{rank, operation.peer, operation.tag}
                               : ChannelKey{operation.peer, rank, operation.tag};
  const bool is_new = channels_.count(key) == 0;
  Channel& channel = channels_[key];
  if (channel.ready) return StartOnChannel(channel, *state);
  channel.waiting.push_back(state);
  if (is_new) ConnectInBackground(key);
  return absl::OkStatus();
}

absl::Status Group::StartOnChannel(Channel& channel, State& state) {
  const Operation operation = state.operation();
  const Stream stream = channel.handle->stream();
  if (absl::Status status = WaitForInputs(stream, state); !status.ok()) return status;
  // The source is rank 0 of the two.
  const int peer = operation.kind == OperationKind::kSend ? 1 : 0;
  absl::Status status =
      LaunchTransfer(*channel.handle, operation, peer, world->StopAt(LastMoment(*world, state)));
  return status.ok() ? state.Started(stream) : status;
}

absl::Status Group::CopyToSelf(const std::shared_ptr<State>& state) {
  const Operation operation = state->operation();
  std::deque<std::shared_ptr<State>>& others = to_self_[operation.tag];
  if (others.empty() || others.front()->operation().kind == operation.kind) {
    others.push_back(state);
    return absl::OkStatus();
  }
  const std::shared_ptr<State> other = std::move(others.front());
  others.pop_front();
  const Operation found = other->operation();
  const Operation& send = operation.kind == OperationKind::kSend ? operation : found;
  const Operation& recv = operation.kind == OperationKind::kSend ? found : operation;
  if (send.input.scalar_type() != recv.output.scalar_type() ||
      send.input.numel() != recv.output.numel()) {
    return absl::FailedPreconditionError(absl::StrCat("in communicator ", name, " rank ", rank,
                                                      " issued ", send.ToString(), " and ",
                                                      recv.ToString()));
  }
  const Stream stream = handle->stream();
  for (State* each : {state.get(), other.get()}) {
    if (absl::Status status = WaitForInputs(stream, *each); !status.ok()) return status;
  }
  absl::Status status = world->library->Copy(
      recv.output.mutable_data_ptr(), send.input.const_data_ptr(), send.input.nbytes(), stream);
  for (State* each : {state.get(), other.get()}) {
    if (status.ok()) status = each->Started(stream);
  }
  return status;
}

void Group::ConnectInBackground(const ChannelKey& key) {
  RunInBackground([group = shared_from_this(), key] {
    const absl::Status status = group->Connect(key);
    if (!status.ok() && !group->world->is_broken()) group->world->BreakEverywhere(status);
  });
}

absl::Status Group::Connect(const ChannelKey& key) {
  absl::StatusOr<std::shared_ptr<Handle>> made = Handle::Make(world->library);
  if (!made.ok()) return made.status();
  if (absl::Status status = world->AddHandle(*made); !status.ok()) return status;
  {
    std::lock_guard<std::mutex> lock(mutex);
    channels_[key].handle = *made;
  }
  absl::StatusOr<UniqueId> id = AgreeOnId(key);
  if (!id.ok()) return id.status();
  // The watchdog knows how long the operations that wait for it may take.
  const bool is_source = std::get<0>(key) == rank;
  absl::Status status =
      (*made)->Init(*id, /*size=*/2, is_source ? 0 : 1, world->StopAt(absl::InfiniteFuture()));
  std::lock_guard<std::mutex> lock(mutex);
  Channel& channel = channels_[key];
  channel.ready = true;
  while (status.ok() && !channel.waiting.empty()) {
    const std::shared_ptr<State> state = std::move(channel.waiting.front());
    channel.waiting.pop_front();
    status = StartOnChannel(channel, *state);
  }
  return status;
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

absl::StatusOr<std::shared_ptr<Handle>> Group::SplitHandle(int color, int key,
                                                           absl::Time deadline) {
  std::shared_ptr<Handle> part;
  if (color >= 0) {
    absl::StatusOr<std::shared_ptr<Handle>> made = Handle::Make(world->library);
    if (!made.ok()) return made.status();
    part = *std::move(made);
    if (absl::Status status = world->AddHandle(part); !status.ok()) return status;
  }
  std::lock_guard<std::mutex> lock(mutex);  // nothing may go on in the communicator meanwhile
  absl::Status status = handle->Split(color, key, part.get(), world->StopAt(deadline));
  if (status.ok()) return part;
  if (part != nullptr) world->Retire(part);
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
