#include "lockstep/comm/nccl/testing/fake_state.h"

#include <algorithm>
#include <cstring>

#include "absl/time/clock.h"

namespace lockstep::comm::nccl::testing {

Stream& CurrentStreamOfThread() {
  static thread_local Stream stream = nullptr;
  return stream;
}

std::optional<Fault> FakeState::Strike(int rank, Where where) {
  const int call = calls[{rank, where}]++;
  for (const Fault& fault : faults) {
    if (fault.rank == rank && fault.where == where && fault.call == call) return fault;
  }
  return std::nullopt;
}

void FakeState::Push(Lock& lock, Stream stream, Task task) {
  if (stream == nullptr) {
    task(lock);
    changed.notify_all();
    return;
  }
  const auto found = streams.find(stream);
  if (found == streams.end()) {
    ++misuses;
    return;
  }
  found->second->tasks.push_back(std::move(task));
  changed.notify_all();
}

std::shared_ptr<FakeComm> FakeState::Find(Comm comm) {
  const auto found = comms.find(comm);
  if (found != comms.end()) return found->second;
  ++misuses;
  return nullptr;
}

void FakeState::Free(Comm comm) {
  comms.erase(comm);
  changed.notify_all();
}

Stream FakeState::AddStream() {
  auto stream = std::make_shared<FakeStream>();
  const auto handle = reinterpret_cast<Stream>(stream.get());
  streams[handle] = stream;
  threads.emplace_back([this, stream] {
    Lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stream->destroyed || !stream->tasks.empty(); });
      if (stream->tasks.empty()) return;
      Task task = std::move(stream->tasks.front());
      stream->tasks.pop_front();
      task(lock);
      changed.notify_all();
    }
  });
  return handle;
}

void FakeState::AwaitDevice(Lock& lock, const FakeComm& comm) {
  changed.wait(lock, [&] {
    return std::none_of(comms.begin(), comms.end(), [&](const auto& entry) {
      const FakeComm& other = *entry.second;
      return &other != &comm && other.world_rank == comm.world_rank && other.queued > 0 &&
             !other.aborted;
    });
  });
}

Comm FakeState::Add(const std::shared_ptr<FakeComm>& comm) {
  const auto handle = reinterpret_cast<Comm>(comm.get());
  comms[handle] = comm;
  return handle;
}

Result FakeComm::State() const {
  if (error != Result::kSuccess) return error;
  const auto& members = clique->members;
  const bool all = std::all_of(members.begin(), members.end(),
                               [](const FakeComm* m) { return m != nullptr && m->joined; });
  const bool connecting = std::any_of(connects.begin(), connects.end(), [&](const auto& each) {
    return clique->launched.count(each) == 0;
  });
  const bool busy = !all || splitting || connecting || absl::Now() < ready_at ||
                    (finalized && (queued > 0 || flush_hangs));
  return busy ? Result::kInProgress : Result::kSuccess;
}

void FakeComm::Fail(Result what) {
  error = what;
  last_error = kFakeLastError;
}

Result FakeState::Begin(Lock& lock, FakeComm& comm, const std::optional<Fault>& fault,
                        const std::function<void()>& start, const std::function<void()>& hang) {
  const What what = fault ? fault->what : What::kIsDelayed;
  switch (what) {
    case What::kFails:
      comm.last_error = kFakeLastError;
      return Result::kSystemError;
    case What::kFailsLater:
      comm.Fail(Result::kRemoteError);
      break;
    case What::kHangs:
      hang();
      break;
    case What::kCallHangs:
      changed.wait(lock, [&] { return comm.aborted; });
      return Result::kInternalError;
    case What::kIsDelayed:
      if (fault) comm.ready_at = absl::Now() + fault->delay;
      start();
      break;
  }
  return Result::kInProgress;
}

Result FakeState::Launch(int rank, Comm comm, Stream stream, const std::vector<int>& peers,
                         Body body) {
  Lock lock(mutex);
  const auto found = Find(comm);
  if (found == nullptr) return Result::kInvalidArgument;
  const std::optional<Fault> fault = Strike(rank, Where::kLaunch);
  const What what = fault ? fault->what : What::kIsDelayed;
  if (what == What::kFails || what == What::kCallHangs) return Begin(lock, *found, fault, [] {});
  const absl::Duration delay = fault ? fault->delay : absl::ZeroDuration();
  Clique& clique = *found->clique;
  if (peers.empty()) {
    clique.launched.insert({found->rank, kAllRanks});
    for (size_t i = 0; i < clique.members.size(); ++i) {
      found->connects.insert({static_cast<int>(i), kAllRanks});
    }
  }
  for (const int peer : peers) {
    clique.launched.insert({found->rank, peer});
    found->connects.insert({peer, found->rank});
  }
  ++found->queued;
  Push(lock, stream, [=, this](Lock& held) {
    changed.wait_for(held, absl::ToChronoMicroseconds(delay), [&] { return found->aborted; });
    if (what == What::kFailsLater) found->Fail(Result::kRemoteError);
    if (what == What::kIsDelayed && !found->aborted) {
      body(held, *this, *found);
    } else {
      changed.wait(held, [&] { return found->aborted; });
    }
    --found->queued;
  });
  const Result state = found->State();
  return found->collectives % 2 == 0 ? state : Result::kInProgress;
}

void FakeState::FormParts(Clique& clique, std::map<int, SplitVote>& votes) {
  std::map<int, std::vector<std::pair<int, int>>> members;  // by color: (key, rank)
  for (const auto& [rank, vote] : votes) {
    clique.members[rank]->splitting = false;
    if (vote.color >= 0) members[vote.color].push_back({vote.key, rank});
  }
  for (auto& [color, ranks] : members) {
    std::sort(ranks.begin(), ranks.end());
    auto part = std::make_shared<Clique>(static_cast<int>(ranks.size()));
    for (size_t i = 0; i < ranks.size(); ++i) {
      auto comm = std::make_shared<FakeComm>();
      comm->clique = part;
      comm->rank = static_cast<int>(i);
      comm->world_rank = clique.members[ranks[i].second]->world_rank;
      comm->joined = true;
      part->members[i] = comm.get();
      Comm* where = votes[ranks[i].second].part;
      all_comms.push_back(comm);
      if (where != nullptr) *where = Add(comm);
    }
  }
  changed.notify_all();
}

void Meet(Lock& lock, FakeState& impl, FakeComm& comm, const Collective& collective,
          uint64_t sequence) {
  std::shared_ptr<Meeting>& entry = comm.clique->meetings[sequence];
  if (entry == nullptr) entry = std::make_shared<Meeting>();
  const std::shared_ptr<Meeting> meeting = entry;
  meeting->arrived[comm.rank] = {&comm, collective};
  if (meeting->arrived.size() == comm.clique->members.size()) {
    std::vector<Collective> ranks;
    bool sound = true;
    for (const auto& [rank, arrived] : meeting->arrived) {
      sound = sound && !arrived.first->aborted && arrived.second.Matches(collective);
      ranks.push_back(arrived.second);
    }
    comm.clique->meetings.erase(sequence);
    if (sound) Execute(ranks);
    meeting->done = sound;
    impl.changed.notify_all();
  }
  impl.changed.wait(lock, [&] { return meeting->done || comm.aborted; });
}

std::vector<int> PeersOf(const std::vector<Transfer>& transfers) {
  std::vector<int> peers;
  for (const Transfer& transfer : transfers) peers.push_back(transfer.peer);
  return peers;
}

Body Exchange(std::vector<Transfer> transfers) {
  return [transfers = std::move(transfers)](Lock& lock, FakeState& impl, FakeComm& comm) {
    auto& mail = comm.clique->mail;
    std::vector<std::shared_ptr<bool>> taken;
    for (const Transfer& transfer : transfers) {
      if (!transfer.sends) continue;
      taken.push_back(std::make_shared<bool>(false));
      mail[{comm.rank, transfer.peer}].push_back(
          {&comm, transfer.data, transfer.bytes, taken.back()});
    }
    impl.changed.notify_all();
    for (const Transfer& transfer : transfers) {
      if (transfer.sends) continue;
      std::deque<Mail>& box = mail[{transfer.peer, comm.rank}];
      impl.changed.wait(lock, [&] {
        return comm.aborted ||
               (!box.empty() && !box.front().from->aborted && box.front().bytes == transfer.bytes);
      });
      if (comm.aborted) return;
      std::memcpy(transfer.data, box.front().data, transfer.bytes);
      *box.front().taken = true;
      box.pop_front();
      impl.changed.notify_all();
    }
    impl.changed.wait(lock, [&] {
      return comm.aborted || std::all_of(taken.begin(), taken.end(), [](auto& t) { return *t; });
    });
  };
}

}  // namespace lockstep::comm::nccl::testing
