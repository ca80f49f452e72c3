#include "lockstep/comm/nccl/testing/fake_library.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/comm/nccl/testing/fake_state.h"

namespace lockstep::comm::nccl::testing {
namespace {

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
    if (impl_->Strike(rank_, Where::kCreateStream)) return OutOfMemory();
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
    if (impl_->Strike(rank_, Where::kCreateEvent)) return OutOfMemory();
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
    if (impl_->Strike(rank_, Where::kRecordEvent)) return OutOfMemory();
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
    if (impl_->Strike(rank_, Where::kWaitEvent)) return OutOfMemory();
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
    impl_->all_comms.push_back(made);
    std::atomic_ref<Comm>(*comm).store(impl_->Add(made));  // an abort may read it
    const std::optional<Fault> fault = impl_->Strike(rank_, Where::kInit);
    return impl_->Begin(lock, *made, fault, [&] {
      made->joined = true;
      clique->members[rank] = made.get();
    });
  }

  Result CommSplit(Comm comm, int color, int key, Comm* part) override {
    Lock lock(impl_->mutex);
    const auto found = impl_->Find(comm);
    if (found == nullptr) return Result::kInvalidArgument;
    if (found->queued > 0) ++impl_->misuses;
    const std::optional<Fault> fault = impl_->Strike(rank_, Where::kSplit);
    found->splitting = true;
    return impl_->Begin(lock, *found, fault, [&] {
      Clique& clique = *found->clique;
      auto& votes = clique.splits[found->splits++];
      votes[found->rank] = {color, key, part};
      if (votes.size() == clique.members.size()) impl_->FormParts(clique, votes);
    });
  }

  Result CommFinalize(Comm comm) override {
    Lock lock(impl_->mutex);
    const auto found = impl_->Find(comm);
    if (found == nullptr) return Result::kInvalidArgument;
    const std::optional<Fault> fault = impl_->Strike(rank_, Where::kFinalize);
    found->finalized = true;
    return impl_->Begin(
        lock, *found, fault, [] {}, [&] { found->flush_hangs = true; });
  }

  Result CommDestroy(Comm comm) override {
    Lock lock(impl_->mutex);
    const auto found = impl_->Find(comm);
    if (found == nullptr) return Result::kInvalidArgument;
    if (!found->finalized || found->queued > 0) ++impl_->misuses;
    impl_->AwaitDevice(lock, *found);
    if (const auto fault = impl_->Strike(rank_, Where::kDestroy)) {
      lock.unlock();
      absl::SleepFor(fault->delay);
      lock.lock();
    }
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
    impl_->AwaitDevice(lock, *found);
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
    *error = found->State();
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
    return impl_->Launch(rank_, group.comm, group.stream, PeersOf(group.transfers),
                         Exchange(group.transfers));
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

  static absl::Status OutOfMemory() { return absl::InternalError("CUDA: out of memory of fake"); }
  static absl::Status Misuse() { return absl::InternalError("CUDA: invalid resource handle"); }

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
    return impl_->Launch(rank_, comm, stream, /*peers=*/{},
                         [collective, sequence](Lock& lock, FakeState& impl, FakeComm& comm) {
                           Meet(lock, impl, comm, collective, sequence);
                         });
  }

  Result Add(Transfer transfer, Comm comm, Stream stream) {
    Group& group = GroupOfThread();
    if (!group.open)
      return impl_->Launch(rank_, comm, stream, {transfer.peer}, Exchange({transfer}));
    group.comm = comm;
    group.stream = stream;
    group.transfers.push_back(transfer);
    return Result::kSuccess;
  }

  const std::shared_ptr<FakeState> impl_;
  const int rank_;
};

}  // namespace

std::shared_ptr<Library> MakeFakeLibrary(std::shared_ptr<FakeState> state, int rank) {
  return std::make_shared<FakeLibrary>(std::move(state), rank);
}

}  // namespace lockstep::comm::nccl::testing
