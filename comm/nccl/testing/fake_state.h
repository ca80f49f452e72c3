#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "lockstep/comm/nccl/testing/fake_library.h"
#include "lockstep/comm/reduce_op.h"

// What the fake ranks share. Private to this folder.
namespace lockstep::comm::nccl::testing {

using Lock = std::unique_lock<std::mutex>;

// Runs with the fabric's mutex, which it gives up while it waits.
using Task = std::function<void(Lock&)>;

struct FakeStream {
  std::deque<Task> tasks;
  bool destroyed = false;
};

struct FakeEvent {
  uint64_t recorded = 0;
  uint64_t completed = 0;
};

struct FakeComm;

enum class CollectiveKind { kAllReduce, kAllGather, kReduceScatter, kBroadcast };

struct Collective {
  CollectiveKind kind = CollectiveKind::kAllReduce;
  const char* input = nullptr;
  char* output = nullptr;
  size_t count = 0;
  at::ScalarType dtype = at::kFloat;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  double factor = 1;  // inputs are multiplied by it

  bool Matches(const Collective& other) const {
    return kind == other.kind && count == other.count && dtype == other.dtype && op == other.op &&
           root == other.root && factor == other.factor;
  }
};

// Carries out what all ranks have started.
void Execute(const std::vector<Collective>& ranks);

struct Transfer {
  bool sends = false;
  char* data = nullptr;
  size_t bytes = 0;
  int peer = 0;
};

struct Meeting {
  std::map<int, std::pair<FakeComm*, Collective>> arrived;
  bool done = false;
};

struct Mail {
  FakeComm* from = nullptr;
  const char* data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<bool> taken;
};

struct SplitVote {
  int color = -1;
  int key = 0;
  Comm* part = nullptr;
};

constexpr int kAllRanks = -1;

// The ranks of one communicator.
struct Clique {
  explicit Clique(int size) : members(size) {}
  std::vector<FakeComm*> members;
  std::map<uint64_t, std::shared_ptr<Meeting>> meetings;
  std::map<std::pair<int, int>, std::deque<Mail>> mail;
  std::set<std::pair<int, int>> launched;  // rank and peer, kAllRanks for a collective
  std::map<uint64_t, std::map<int, SplitVote>> splits;
};

struct FakeComm {
  std::shared_ptr<Clique> clique;
  int rank = 0;        // in the clique
  int world_rank = 0;  // of the library
  bool joined = false;
  bool splitting = false;
  bool finalized = false;
  bool flush_hangs = false;
  bool aborted = false;
  absl::Time ready_at = absl::InfinitePast();
  Result error = Result::kSuccess;
  std::string last_error;
  uint64_t collectives = 0;
  uint64_t splits = 0;
  int queued = 0;
  std::set<std::pair<int, int>> connects;  // what must be launched before its own launches are over
  std::map<Reduction, double> factors;     // of CreatePreMulSum

  Result State() const;  // as ncclCommGetAsyncError tells it
  void Fail(Result what);
};

// An operation of a communicator: runs with the mutex, gives up when the communicator is aborted.
using Body = std::function<void(Lock&, FakeState&, FakeComm&)>;

// Runs a collective together with the other ranks, when the last of them has come.
void Meet(Lock& lock, FakeState& impl, FakeComm& comm, const Collective& collective,
          uint64_t sequence);

std::vector<int> PeersOf(const std::vector<Transfer>& transfers);

// All of `transfers` go on together.
Body Exchange(std::vector<Transfer> transfers);

struct FakeState {
  std::mutex mutex;
  std::condition_variable changed;  // for all that waits for anything
  std::vector<std::thread> threads;
  std::map<Stream, std::shared_ptr<FakeStream>> streams;
  std::map<Event, std::shared_ptr<FakeEvent>> events;
  std::map<Comm, std::shared_ptr<FakeComm>> comms;
  std::vector<std::shared_ptr<FakeComm>> all_comms;  // those freed too, as others look at them
  std::map<UniqueId, std::shared_ptr<Clique>> cliques;
  int next_id = 0;
  std::vector<Fault> faults;
  std::function<at::Device(int rank)> device_of;
  std::vector<int> devices;  // by rank
  std::map<std::pair<int, Where>, int> calls;
  int misuses = 0;

  // Queues an operation of the communicator with `peers`, none for a collective, or what a fault
  // makes of it. Takes the mutex; those below need it.
  Result Launch(int rank, Comm comm, Stream stream, const std::vector<int>& peers, Body body);

  // Counts a call; the fault that strikes it.
  std::optional<Fault> Strike(int rank, Where where);

  // Appends to a stream; the host's null one runs the task at once.
  void Push(Lock& lock, Stream stream, Task task);

  std::shared_ptr<FakeComm> Find(Comm comm);
  void Free(Comm comm);

  // Waits as freeing device memory does: until nothing of the rank runs on the device that is not
  // of `comm`.
  void AwaitDevice(Lock& lock, const FakeComm& comm);
  Comm Add(const std::shared_ptr<FakeComm>& comm);
  Stream AddStream();

  // Starts something that FakeComm::State tells the end of, or what a fault makes of it.
  Result Begin(
      Lock& lock, FakeComm& comm, const std::optional<Fault>& fault,
      const std::function<void()>& start, const std::function<void()>& hang = [] {});

  // The communicators of a split for which all have voted.
  void FormParts(Clique& clique, std::map<int, SplitVote>& votes);
};

std::shared_ptr<Library> MakeFakeLibrary(std::shared_ptr<FakeState> state, int rank);

// One for each thread.
Stream& CurrentStreamOfThread();

}  // namespace lockstep::comm::nccl::testing
