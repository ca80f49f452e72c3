#include "lockstep/comm/inprocess/inprocess_communicator.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/comm/control_plane.h"
#include "lockstep/comm/departure.h"
#include "lockstep/comm/inprocess/execute.h"

namespace lockstep::comm::inprocess {
namespace {

class Group;

// What the communicators that stem from one Create() share.
struct World {
  Options options;
  std::shared_ptr<Store> store = Store::InProcess();
  std::mutex mutex;
  std::condition_variable met;  // a Split() is complete, or the world is broken
  absl::Status broken;
  std::vector<std::weak_ptr<Group>> groups;
};

// Fails everything pending and to come. Must be called without World::mutex.
void Break(World& world, const absl::Status& reason);

class State : public WorkState {
 public:
  State(std::weak_ptr<Group> group, absl::Duration deadline)
      : group_(std::move(group)),
        issued_(absl::Now()),
        deadline_(std::chrono::steady_clock::now() + absl::ToChronoMicroseconds(deadline)) {}

  absl::Status Wait() override;
  absl::Duration age() const { return absl::Now() - issued_; }

 private:
  const std::weak_ptr<Group> group_;  // it owns the pending states
  const absl::Time issued_;
  const std::chrono::steady_clock::time_point deadline_;
};

struct Entry {
  int rank = 0;
  Operation operation;
  std::shared_ptr<State> state;
};

// What waits on a rank's side for its turn: an operation, or an earlier work to be done.
struct Queued {
  std::optional<Work> after;
  Entry entry;
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  Group(std::shared_ptr<World> world, std::string name, int size)
      : world_(std::move(world)), name_(std::move(name)), ranks_(size) {}

  ~Group() {
    for (const Entry& entry : TakeAll()) {
      entry.state->Finish(absl::CancelledError(
          absl::StrCat(entry.operation.ToString(), ": all ranks' communicators were destroyed")));
    }
  }

  // What a rank brings to a Split.
  struct Vote {
    std::optional<int> color;
    int key = 0;
    std::shared_ptr<trace::FlightRecorder> flight_recorder;
  };

  World& world() { return *world_; }
  const std::string& name() const { return name_; }
  int size() const { return static_cast<int>(ranks_.size()); }

  Work Issue(int rank, Operation operation);
  void StartAfter(int rank, const Work& work);
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int rank, Vote vote);

  // A rank's communicator is destroyed. What it has issued goes on.
  void Leave(int rank);

  // Called by the state of an operation that is past its deadline.
  void TimeOut(const State* state);

  // Removes and returns all that is pending. The caller holds World::mutex, or is the last user.
  std::vector<Entry> TakeAll();

 private:
  struct Rank {
    uint64_t collectives = 0;
    uint64_t transfers = 0;
    uint64_t splits = 0;
    OperationKind last = OperationKind::kBarrier;
    IssuedCounts issued;
    bool left = false;
    std::deque<Queued> queue;
  };
  struct Meeting {
    std::map<int, Vote> votes;
    std::map<int, std::unique_ptr<Communicator>> parts;
    int taken = 0;
  };
  using TransferKey = std::tuple<int, int, int>;  // source, destination, tag

  void Drain(int rank);

  // Breaks the world where somebody waits for a rank that has left without issuing its part.
  void FailDeserted();

  // Adds an operation whose turn has come; returns the entries that it completes. Needs the mutex.
  std::vector<Entry> Arrive(Entry entry);

  void Complete(const std::vector<Entry>& entries);
  void Form(Meeting& meeting, uint64_t index);
  std::vector<RankProgress> Missing(const Entry& entry);
  const Entry* Find(const State* state) const;

  const std::shared_ptr<World> world_;
  const std::string name_;
  std::vector<Rank> ranks_;
  bool some_left_ = false;
  std::map<uint64_t, std::map<int, Entry>> collectives_;  // by sequence number, then by rank
  std::map<TransferKey, std::deque<Entry>> sends_;
  std::map<TransferKey, std::deque<Entry>> recvs_;
  std::map<uint64_t, Meeting> meetings_;
};

class InProcessCommunicator : public Communicator {
 public:
  InProcessCommunicator(std::shared_ptr<Group> group, int rank,
                        std::shared_ptr<trace::FlightRecorder> flight_recorder)
      : Communicator(rank, group->size(), at::Device(at::kCPU), group->name(),
                     std::move(flight_recorder)),
        group_(std::move(group)) {}
  ~InProcessCommunicator() override { group_->Leave(this->rank()); }

  absl::StatusOr<std::unique_ptr<Communicator>> Split(std::optional<int> color, int key) override {
    return group_->Split(rank(), {color, key, flight_recorder()});
  }
  void StartAfter(const Work& work) override { group_->StartAfter(rank(), work); }
  void Abort(absl::Status reason) override {
    Break(group_->world(), absl::AbortedError(absl::StrCat("aborted by rank ", rank(), ": ",
                                                           std::string{reason.message()})));
  }
  Store& store() override { return *group_->world().store; }
  Work Issue(Operation operation) override { return group_->Issue(rank(), std::move(operation)); }

 private:
  const std::shared_ptr<Group> group_;
};

void Break(World& world, const absl::Status& reason) {
  std::vector<Entry> failed;
  {
    std::lock_guard<std::mutex> lock(world.mutex);
    if (!world.broken.ok()) return;
    world.broken = reason;
    for (const auto& weak : world.groups) {
      if (std::shared_ptr<Group> group = weak.lock()) {
        for (Entry& entry : group->TakeAll()) failed.push_back(std::move(entry));
      }
    }
    world.met.notify_all();
  }
  for (const Entry& entry : failed) entry.state->Finish(reason);
}

absl::Status State::Wait() {
  while (!BlockUntil(
      std::max(deadline_, std::chrono::steady_clock::now() + std::chrono::milliseconds(1)))) {
    if (std::shared_ptr<Group> group = group_.lock()) group->TimeOut(this);
  }
  return Observe();
}

Work Group::Issue(int rank, Operation operation) {
  auto state = std::make_shared<State>(weak_from_this(), world_->options.deadline);
  {
    std::lock_guard<std::mutex> lock(world_->mutex);
    if (!world_->broken.ok()) return Work(world_->broken);
    Rank& mine = ranks_[rank];
    if (IsCollective(operation.kind)) {
      operation.sequence = ++mine.collectives;
      mine.last = operation.kind;
    } else {
      operation.sequence = ++mine.transfers;
    }
    mine.issued.Add(operation);
    mine.queue.push_back({.entry = {rank, std::move(operation), state}});
  }
  Drain(rank);
  FailDeserted();
  return Work(std::move(state));
}

void Group::StartAfter(int rank, const Work& work) {
  {
    std::lock_guard<std::mutex> lock(world_->mutex);
    ranks_[rank].queue.push_back({.after = work});
  }
  // Holds the group: what follows goes on where its communicators have been destroyed meanwhile.
  work.state()->OnDone([group = shared_from_this(), rank](const absl::Status& status) {
    if (!status.ok()) Break(group->world(), status);
    group->Drain(rank);
    group->FailDeserted();
  });
}

void Group::Leave(int rank) {
  {
    std::lock_guard<std::mutex> lock(world_->mutex);
    ranks_[rank].left = true;
    some_left_ = true;
  }
  FailDeserted();
}

void Group::FailDeserted() {
  absl::Status status;
  {
    std::lock_guard<std::mutex> lock(world_->mutex);
    if (!some_left_) return;
    const auto check = [&](const Entry& entry) {
      for (int rank = 0; rank < size() && status.ok(); ++rank) {
        const Departure departure = {rank, ranks_[rank].issued};
        if (ranks_[rank].left &&
            IsDeserted(entry.operation, entry.rank, ranks_[entry.rank].issued, departure)) {
          status = DesertedError(entry.operation, name_, entry.rank, size(), departure);
        }
      }
    };
    for (const auto& [sequence, arrived] : collectives_) {
      for (const auto& [rank, entry] : arrived) check(entry);
    }
    for (const auto* transfers : {&sends_, &recvs_}) {
      for (const auto& [key, entries] : *transfers) {
        for (const Entry& entry : entries) check(entry);
      }
    }
  }
  if (!status.ok()) Break(*world_, status);
}

void Group::Drain(int rank) {
  for (;;) {
    std::vector<Entry> complete;
    {
      std::lock_guard<std::mutex> lock(world_->mutex);
      std::deque<Queued>& queue = ranks_[rank].queue;
      if (queue.empty()) return;
      if (queue.front().after) {
        if (!queue.front().after->IsDone()) return;
        queue.pop_front();
        continue;
      }
      Entry entry = std::move(queue.front().entry);
      queue.pop_front();
      complete = Arrive(std::move(entry));
    }
    if (!complete.empty()) Complete(complete);
  }
}

std::vector<Entry> Group::Arrive(Entry entry) {
  std::vector<Entry> complete;
  const Operation& operation = entry.operation;
  if (IsCollective(operation.kind)) {
    const uint64_t sequence = operation.sequence;
    std::map<int, Entry>& arrived = collectives_[sequence];
    arrived.emplace(entry.rank, std::move(entry));
    if (static_cast<int>(arrived.size()) == size()) {
      for (auto& [rank, each] : arrived) complete.push_back(std::move(each));
      collectives_.erase(sequence);
    }
    return complete;
  }
  const bool sends = operation.kind == OperationKind::kSend;
  const TransferKey key = sends ? TransferKey{entry.rank, operation.peer, operation.tag}
                                : TransferKey{operation.peer, entry.rank, operation.tag};
  std::deque<Entry>& others = sends ? recvs_[key] : sends_[key];
  if (others.empty()) {
    (sends ? sends_ : recvs_)[key].push_back(std::move(entry));
    return complete;
  }
  Entry other = std::move(others.front());
  others.pop_front();
  complete.push_back(sends ? std::move(entry) : std::move(other));
  complete.push_back(sends ? std::move(other) : std::move(entry));
  return complete;
}

void Group::Complete(const std::vector<Entry>& entries) {
  std::vector<Operation> operations;
  for (const Entry& entry : entries) operations.push_back(entry.operation);
  const absl::Status status = Execute(name_, operations);
  for (const Entry& entry : entries) entry.state->Finish(status);
  if (!status.ok()) Break(*world_, status);
}

absl::StatusOr<std::unique_ptr<Communicator>> Group::Split(int rank, Vote vote) {
  std::unique_lock<std::mutex> lock(world_->mutex);
  const uint64_t index = ++ranks_[rank].splits;
  Meeting& meeting = meetings_[index];
  meeting.votes[rank] = std::move(vote);
  const auto complete = [&] { return static_cast<int>(meeting.votes.size()) == size(); };
  if (complete()) {
    Form(meeting, index);
    world_->met.notify_all();
  }
  const bool met = world_->met.wait_for(lock, absl::ToChronoMicroseconds(world_->options.deadline),
                                        [&] { return complete() || !world_->broken.ok(); });
  if (!world_->broken.ok()) return world_->broken;
  if (!met) {
    std::string missing;
    for (int i = 0; i < size(); ++i) {
      if (meeting.votes.count(i) == 0) absl::StrAppend(&missing, missing.empty() ? "" : ", ", i);
    }
    const absl::Status status = absl::DeadlineExceededError(
        absl::StrCat("Split #", index, " of communicator ", name_, " on rank ", rank, " of ",
                     size(), " is not done after ", absl::FormatDuration(world_->options.deadline),
                     ": waiting for rank ", missing));
    lock.unlock();
    Break(*world_, status);
    return status;
  }
  std::unique_ptr<Communicator> part = std::move(meeting.parts[rank]);
  if (++meeting.taken == size()) meetings_.erase(index);
  return part;
}

void Group::Form(Meeting& meeting, uint64_t index) {
  std::map<int, std::vector<std::pair<int, int>>> members;  // by color: (key, rank)
  for (const auto& [rank, vote] : meeting.votes) {
    if (vote.color) members[*vote.color].push_back({vote.key, rank});
  }
  for (auto& [color, ranks] : members) {
    std::sort(ranks.begin(), ranks.end());
    std::string name = absl::StrCat(name_, "/", index);
    if (members.size() > 1) absl::StrAppend(&name, ".", color);
    auto group = std::make_shared<Group>(world_, name, static_cast<int>(ranks.size()));
    world_->groups.push_back(group);
    for (size_t i = 0; i < ranks.size(); ++i) {
      const int rank = ranks[i].second;
      meeting.parts[rank] = std::make_unique<InProcessCommunicator>(
          group, static_cast<int>(i), meeting.votes[rank].flight_recorder);
    }
  }
}

void Group::TimeOut(const State* state) {
  absl::Status status;
  {
    std::lock_guard<std::mutex> lock(world_->mutex);
    const Entry* entry = Find(state);
    if (entry == nullptr) return;  // it is being carried out
    status =
        DeadlineError(entry->operation, name_, entry->rank, size(), state->age(), Missing(*entry));
  }
  Break(*world_, status);
}

std::vector<RankProgress> Group::Missing(const Entry& entry) {
  std::vector<RankProgress> missing;
  const auto add = [&](int rank) {
    missing.push_back(
        {.rank = rank, .issued = ranks_[rank].collectives, .last_issued = Name(ranks_[rank].last)});
  };
  if (!IsCollective(entry.operation.kind)) {
    add(entry.operation.peer);
    return missing;
  }
  const auto arrived = collectives_.find(entry.operation.sequence);
  for (int rank = 0; rank < size(); ++rank) {
    const bool here = arrived != collectives_.end() && arrived->second.count(rank) != 0;
    if (!here) add(rank);
  }
  return missing;
}

const Entry* Group::Find(const State* state) const {
  for (const Rank& rank : ranks_) {
    for (const Queued& queued : rank.queue) {
      if (queued.entry.state.get() == state) return &queued.entry;
    }
  }
  for (const auto& [sequence, arrived] : collectives_) {
    for (const auto& [rank, entry] : arrived) {
      if (entry.state.get() == state) return &entry;
    }
  }
  for (const auto* transfers : {&sends_, &recvs_}) {
    for (const auto& [key, entries] : *transfers) {
      for (const Entry& entry : entries) {
        if (entry.state.get() == state) return &entry;
      }
    }
  }
  return nullptr;
}

std::vector<Entry> Group::TakeAll() {
  std::vector<Entry> all;
  for (Rank& rank : ranks_) {
    for (Queued& queued : rank.queue) {
      if (!queued.after) all.push_back(std::move(queued.entry));
    }
    rank.queue.clear();
  }
  for (auto& [sequence, arrived] : collectives_) {
    for (auto& [rank, entry] : arrived) all.push_back(std::move(entry));
  }
  for (auto* transfers : {&sends_, &recvs_}) {
    for (auto& [key, entries] : *transfers) {
      for (Entry& entry : entries) all.push_back(std::move(entry));
    }
    transfers->clear();
  }
  collectives_.clear();
  return all;
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> Create(int size, Options options) {
  auto world = std::make_shared<World>();
  // Longer ones overflow the clock's nanoseconds.
  world->options.deadline = std::min(options.deadline, absl::Hours(24 * 365));
  auto group = std::make_shared<Group>(world, "world", size);
  world->groups.push_back(group);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<InProcessCommunicator>(
        group, rank, std::make_shared<trace::FlightRecorder>()));
  }
  return ranks;
}

}  // namespace lockstep::comm::inprocess
