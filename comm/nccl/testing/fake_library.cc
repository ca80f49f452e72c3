#include "lockstep/comm/nccl/testing/fake_library.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/comm/nccl/testing/fake_state.h"

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

// One rank's.
class FakeLibrary : public Library {
 public:
  FakeLibrary(std::shared_ptr<FakeState> impl, int rank) : impl_(std::move(impl)), rank_(rank) {}

  at::Device device() const override { return impl_->device_of(rank_); }

  absl::StatusOr<std::string> DeviceUuid() override {
    Lock lock(impl_->mutex);
    return absl::StrCat("GPU-fake-", impl_->devices[rank_]);
  }

  absl::StatusOr<Stream> CreateStream() override {
    Lock lock(impl_->mutex);
    return impl_->AddStream();
  }

  void DestroyStream(Stream stream) override {
    Lock lock(impl_->mutex);
    const auto found = impl_->streams.find(stream);
    if (found == impl_->streams.end()) {
      ++impl_->misuses;
      return;
    }
    found->second->destroyed = true;
    impl_->streams.erase(found);
    impl_->changed.notify_all();
  }

  Stream CurrentStream() override { return CurrentStreamOfThread(); }

  absl::StatusOr<Event> CreateEvent() override {
    Lock lock(impl_->mutex);
    auto event = std::make_shared<FakeEvent>();
    const auto handle = reinterpret_cast<Event>(event.get());
    impl_->events[handle] = std::move(event);
    return handle;
  }

  void DestroyEvent(Event event) override {
    Lock lock(impl_->mutex);
    if (impl_->events.erase(event) == 0) ++impl_->misuses;
  }

  absl::Status RecordEvent(Event event, Stream stream) override {
    Lock lock(impl_->mutex);
    if (impl_->Strike(rank_, Where::kRecordEvent)) {
      return absl::InternalError("CUDA: out of memory of fake");
    }
    auto found = FindEvent(event);
    if (found == nullptr) return Misuse();
    const uint64_t version = ++found->recorded;
    impl_->Push(lock, stream, [found, version](Lock&) {
      found->completed = std::max(found->completed, version);
    });
    return absl::OkStatus();
  }

  absl::Status WaitEvent(Stream stream, Event event) override {
    Lock lock(impl_->mutex);
    auto found = FindEvent(event);
    if (found == nullptr) return Misuse();
    const uint64_t version = found->recorded;
    impl_->Push(lock, stream, [impl = impl_.get(), found, version](Lock& held) {
      impl->changed.wait(held, [&] { return found->completed >= version; });
    });
    return absl::OkStatus();
  }

  absl::StatusOr<bool> QueryEvent(Event event) override {
    Lock lock(impl_->mutex);
    if (impl_->Strike(rank_, Where::kQueryEvent)) {
      return absl::InternalError("CUDA: an illegal memory access of fake was encountered");
    }
    auto found = FindEvent(event);
    if (found == nullptr) return Misuse();
    return found->completed >= found->recorded;
  }

  absl::Status Copy(void* to, const void* from, size_t bytes, Stream stream) override {
    Lock lock(impl_->mutex);
    impl_->Push(lock, stream, [=](Lock&) {
      if (bytes != 0) std::memcpy(to, from, bytes);
    });
    return absl::OkStatus();
  }

  absl::Status Scale(const at::Tensor& tensor, double factor, Stream stream) override {
    Lock lock(impl_->mutex);
    impl_->Push(lock, stream, [data = tensor.data(), factor](Lock&) { data.mul_(factor); });
    return absl::OkStatus();
  }

  const char* ErrorString(Result result) override {
    switch (result) {
      case Result::kSystemError:
        return "unhandled system error of fake";
      case Result::kRemoteError:
        return "remote process exited or there was a network error of fake";
      default:
        return "error of fake";
    }
  }

  std::string LastError(Comm comm) override {
    Lock lock(impl_->mutex);
    if (comm == nullptr) return kFakeLastError;
    const auto found = impl_->Find(comm);
    return found == nullptr ? "" : found->last_error;
  }

  Result GetUniqueId(UniqueId* id) override {
    Lock lock(impl_->mutex);
    if (impl_->Strike(rank_, Where::kGetUniqueId)) return Result::kSystemError;
    const std::string text = absl::StrCat("fake", impl_->next_id++);
    id->fill(0);
    std::copy(text.begin(), text.end(), id->begin());
    return Result::kSuccess;
  }

  Result CommInitRank(Comm* comm, int size, const UniqueId& id, int rank) override {
    Lock lock(impl_->mutex);
    std::shared_ptr<Clique>& clique = impl_->cliques[id];
    if (clique == nullptr) clique = std::make_shared<Clique>(size);
    auto made = std::make_shared<FakeComm>();
    made->clique = clique;
    made->rank = rank;
    made->world_rank = rank_;
    *comm = Add(made);
    const std::optional<Fault> fault = impl_->Strike(rank_, Where::kInit);
    return Begin(lock, *made, fault, [&] {
      made->joined = true;
      clique->members[rank] = made;
    });
  }

  Result CommSplit(Comm comm, int color, int key, Comm* part) override {
    Lock lock(impl_->mutex);
    const auto found = impl_->Find(comm);
    if (found == nullptr) return Result::kInvalidArgument;
    if (found->queued > 0) ++impl_->misuses;
    const std::optional<Fault> fault = impl_->Strike(rank_, Where::kSplit);
    found->splitting = true;
    return Begin(lock, *found, fault, [&] {
      Clique& clique = *found->clique;
      auto& votes = clique.splits[found->splits++];
      votes[found->rank] = {color, key, part};
      if (votes.size() == clique.members.size()) FormParts(clique, votes);
    });
  }

  Result CommFinalize(Comm comm) override {
    Lock lock(impl_->mutex);
    const auto found = impl_->Find(comm);
    if (found == nullptr) return Result::kInvalidArgument;
    const std::optional<Fault> fault = impl_->Strike(rank_, Where::kFinalize);
    found->finalized = true;
    return Begin(
        lock, *found, fault, [] {}, [&] { found->flush_hangs = true; });
  }

  Result CommDestroy(Comm comm) override {
    Lock lock(impl_->mutex);
    const auto found = impl_->Find(comm);
    if (found == nullptr) return Result::kInvalidArgument;
    if (!found->finalized || found->queued > 0) ++impl_->misuses;
    impl_->Free(comm);
    return Result::kSuccess;
  }

  Result CommAbort(Comm comm) override {
    Lock lock(impl_->mutex);
    const auto found = impl_->Find(comm);
    if (found == nullptr) return Result::kInvalidArgument;
    found->aborted = true;
    for (auto& [index, votes] : found->clique->splits) {
      const auto mine = votes.find(found->rank);
      if (mine != votes.end()) mine->second.part = nullptr;
    }
    impl_->changed.notify_all();
    if (const auto fault = impl_->Strike(rank_, Where::kAbort)) {
      lock.unlock();
      absl::SleepFor(fault->delay);
      lock.lock();
    }
    impl_->Free(comm);
    return Result::kSuccess;
  }

  Result GetAsyncError(Comm comm, Result* error) override {
    Lock lock(impl_->mutex);
    const auto found = impl_->Find(comm);
    if (found == nullptr) return Result::kInvalidArgument;
    *error = StateOf(*found);
    return Result::kSuccess;
  }

  Result GroupStart() override {
    GroupOfThread().open = true;
    return Result::kSuccess;
  }

  Result GroupEnd() override {
    Group group;
    std::swap(group, GroupOfThread());
    if (group.transfers.empty()) return Result::kSuccess;
    return Launch(group.comm, group.stream, Transfers(std::move(group.transfers)));
  }

  Result AllReduce(const void* input, void* output, size_t count, at::ScalarType dtype,
                   Reduction reduction, Comm comm, Stream stream) override {
    return Collect(CollectiveKind::kAllReduce, input, output, count, dtype, reduction, 0, comm,
                   stream);
  }

  Result AllGather(const void* input, void* output, size_t count, at::ScalarType dtype, Comm comm,
                   Stream stream) override {
    return Collect(CollectiveKind::kAllGather, input, output, count, dtype, kSum, 0, comm, stream);
  }

  Result ReduceScatter(const void* input, void* output, size_t count, at::ScalarType dtype,
                       Reduction reduction, Comm comm, Stream stream) override {
    return Collect(CollectiveKind::kReduceScatter, input, output, count, dtype, reduction, 0, comm,
                   stream);
  }

  Result Broadcast(const void* input, void* output, size_t count, at::ScalarType dtype, int root,
                   Comm comm, Stream stream) override {
    return Collect(CollectiveKind::kBroadcast, input, output, count, dtype, kSum, root, comm,
                   stream);
  }

  Result Send(const void* input, size_t count, at::ScalarType dtype, int peer, Comm comm,
              Stream stream) override {
    char* data = const_cast<char*>(static_cast<const char*>(input));
    return Add({true, data, count * c10::elementSize(dtype), peer}, comm, stream);
  }

  Result Recv(void* output, size_t count, at::ScalarType dtype, int peer, Comm comm,
              Stream stream) override {
    return Add({false, static_cast<char*>(output), count * c10::elementSize(dtype), peer}, comm,
               stream);
  }

  Result CreatePreMulSum(Reduction* reduction, double factor, at::ScalarType, Comm comm) override {
    Lock lock(impl_->mutex);
    const auto found = impl_->Find(comm);
    if (found == nullptr) return Result::kInvalidArgument;
    *reduction = 5;
    while (found->factors.count(*reduction) != 0) ++*reduction;
    found->factors[*reduction] = factor;
    return Result::kSuccess;
  }

  Result DestroyReduction(Reduction reduction, Comm comm) override {
    Lock lock(impl_->mutex);
    const auto found = impl_->Find(comm);
    if (found == nullptr) return Result::kInvalidArgument;
    if (found->factors.erase(reduction) == 0) ++impl_->misuses;
    return Result::kSuccess;
  }

 private:
  // What a thread has between GroupStart and GroupEnd.
  struct Group {
    bool open = false;
    std::vector<Transfer> transfers;
    Comm comm = nullptr;
    Stream stream = nullptr;
  };

  // Work of a communicator: runs with the mutex, gives up when it is aborted.
  using Body = std::function<void(Lock&, FakeState&, FakeComm&)>;

  static Group& GroupOfThread() {
    static thread_local Group group;
    return group;
  }

  std::shared_ptr<FakeEvent> FindEvent(Event event) {
    const auto found = impl_->events.find(event);
    if (found != impl_->events.end()) return found->second;
    ++impl_->misuses;
    return nullptr;
  }

  static absl::Status Misuse() { return absl::InternalError("CUDA: invalid resource handle"); }

  Comm Add(const std::shared_ptr<FakeComm>& comm) {
    const auto handle = reinterpret_cast<Comm>(comm.get());
    impl_->comms[handle] = comm;
    return handle;
  }

  static Result StateOf(const FakeComm& comm) {
    if (comm.error != Result::kSuccess) return comm.error;
    const auto& members = comm.clique->members;
    const bool all = std::all_of(members.begin(), members.end(),
                                 [](const auto& m) { return m != nullptr && m->joined; });
    const bool busy = !all || comm.splitting || absl::Now() < comm.ready_at ||
                      (comm.finalized && (comm.queued > 0 || comm.flush_hangs));
    return busy ? Result::kInProgress : Result::kSuccess;
  }

  static void Fail(FakeComm& comm, Result error) {
    comm.error = error;
    comm.last_error = kFakeLastError;
  }

  // Starts something that GetAsyncError tells the end of, or what a fault makes of it.
  Result Begin(
      Lock& lock, FakeComm& comm, const std::optional<Fault>& fault,
      const std::function<void()>& start, const std::function<void()>& hang = [] {}) {
    const What what = fault ? fault->what : What::kIsDelayed;
    switch (what) {
      case What::kFails:
        comm.last_error = kFakeLastError;
        return Result::kSystemError;
      case What::kFailsLater:
        Fail(comm, Result::kRemoteError);
        break;
      case What::kHangs:
        hang();
        break;
      case What::kCallHangs:
        impl_->changed.wait(lock, [&] { return comm.aborted; });
        return Result::kInternalError;
      case What::kIsDelayed:
        if (fault) comm.ready_at = absl::Now() + fault->delay;
        start();
        break;
    }
    return Result::kInProgress;
  }

  void FormParts(Clique& clique, std::map<int, SplitVote>& votes) {
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
        part->members[i] = comm;
        Comm* where = votes[ranks[i].second].part;
        if (where != nullptr) *where = Add(comm);
      }
    }
    impl_->changed.notify_all();
  }

  Result Collect(CollectiveKind kind, const void* input, void* output, size_t count,
                 at::ScalarType dtype, Reduction reduction, int root, Comm comm, Stream stream) {
    Collective collective{.kind = kind,
                          .input = static_cast<const char*>(input),
                          .output = static_cast<char*>(output),
                          .count = count,
                          .dtype = dtype,
                          .root = root};
    uint64_t sequence = 0;
    {
      Lock lock(impl_->mutex);
      const auto found = impl_->Find(comm);
      if (found == nullptr) return Result::kInvalidArgument;
      sequence = found->collectives++;
      switch (reduction) {
        case kSum:
          break;
        case kProduct:
          collective.op = ReduceOp::kProduct;
          break;
        case kMax:
          collective.op = ReduceOp::kMax;
          break;
        case kMin:
          collective.op = ReduceOp::kMin;
          break;
        case kAverage:
          collective.op = ReduceOp::kAverage;
          break;
        default:
          collective.factor = found->factors.at(reduction);
      }
    }
    return Launch(comm, stream,
                  [collective, sequence](Lock& lock, FakeState& impl, FakeComm& comm) {
                    Meet(lock, impl, comm, collective, sequence);
                  });
  }

  static void Meet(Lock& lock, FakeState& impl, FakeComm& comm, const Collective& collective,
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

  Result Add(Transfer transfer, Comm comm, Stream stream) {
    Group& group = GroupOfThread();
    if (!group.open) return Launch(comm, stream, Transfers({transfer}));
    group.comm = comm;
    group.stream = stream;
    group.transfers.push_back(transfer);
    return Result::kSuccess;
  }

  // All of them go on together.
  static Body Transfers(std::vector<Transfer> transfers) {
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
          return comm.aborted || (!box.empty() && !box.front().from->aborted &&
                                  box.front().bytes == transfer.bytes);
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

  Result Launch(Comm comm, Stream stream, Body body) {
    Lock lock(impl_->mutex);
    const auto found = impl_->Find(comm);
    if (found == nullptr) return Result::kInvalidArgument;
    const std::optional<Fault> fault = impl_->Strike(rank_, Where::kLaunch);
    const What what = fault ? fault->what : What::kIsDelayed;
    if (what == What::kFails || what == What::kCallHangs) return Begin(lock, *found, fault, [] {});
    const absl::Duration delay = fault ? fault->delay : absl::ZeroDuration();
    ++found->queued;
    impl_->Push(lock, stream, [=, impl = impl_.get()](Lock& held) {
      impl->changed.wait_for(held, absl::ToChronoMicroseconds(delay),
                             [&] { return found->aborted; });
      if (what == What::kFailsLater) Fail(*found, Result::kRemoteError);
      if (what == What::kIsDelayed && !found->aborted) {
        body(held, *impl, *found);
      } else {
        impl->changed.wait(held, [&] { return found->aborted; });
      }
      --found->queued;
    });
    return found->collectives % 2 == 0 ? Result::kSuccess : Result::kInProgress;
  }

  const std::shared_ptr<FakeState> impl_;
  const int rank_;
};

FakeFabric::FakeFabric(int size, std::function<at::Device(int rank)> device_of)
    : impl_(std::make_shared<FakeState>()) {
  impl_->device_of = std::move(device_of);
  for (int rank = 0; rank < size; ++rank) impl_->devices.push_back(rank);
}

FakeFabric::~FakeFabric() {
  std::vector<std::thread> threads;
  {
    Lock lock(impl_->mutex);
    for (auto& [handle, stream] : impl_->streams) stream->destroyed = true;
    threads.swap(impl_->threads);
    impl_->changed.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
}

std::shared_ptr<Library> FakeFabric::library(int rank) {
  return std::make_shared<FakeLibrary>(impl_, rank);
}

void FakeFabric::Inject(const Fault& fault) {
  Lock lock(impl_->mutex);
  impl_->faults.push_back(fault);
}

void FakeFabric::ShareDevice(int rank, int with) {
  Lock lock(impl_->mutex);
  impl_->devices[rank] = impl_->devices[with];
}

LiveCounts FakeFabric::live() const {
  Lock lock(impl_->mutex);
  return {.streams = static_cast<int>(impl_->streams.size()),
          .events = static_cast<int>(impl_->events.size()),
          .communicators = static_cast<int>(impl_->comms.size())};
}

int FakeFabric::misuses() const {
  Lock lock(impl_->mutex);
  return impl_->misuses;
}

int FakeFabric::calls(int rank, Where where) const {
  Lock lock(impl_->mutex);
  const auto found = impl_->calls.find({rank, where});
  return found == impl_->calls.end() ? 0 : found->second;
}

QueuedStream::QueuedStream(FakeFabric& fabric, int rank)
    : library_(fabric.library(rank)),
      impl_(fabric.impl_),
      stream_(*library_->CreateStream()),
      previous_(CurrentStreamOfThread()) {
  CurrentStreamOfThread() = stream_;
}

QueuedStream::~QueuedStream() {
  Synchronize();
  CurrentStreamOfThread() = previous_;
  library_->DestroyStream(stream_);
}

void QueuedStream::Run(std::function<void()> kernel) {
  Lock lock(impl_->mutex);
  impl_->Push(lock, stream_, [kernel = std::move(kernel)](Lock&) { kernel(); });
}

void QueuedStream::Synchronize() {
  Lock lock(impl_->mutex);
  bool reached = false;
  impl_->Push(lock, stream_, [&](Lock&) { reached = true; });
  impl_->changed.wait(lock, [&] { return reached; });
}

}  // namespace lockstep::comm::nccl::testing
