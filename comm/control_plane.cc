#include "lockstep/comm/control_plane.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"

namespace lockstep::comm {
namespace {

constexpr char kAbortKey[] = "abort";
constexpr char kAbortCountKey[] = "aborts";

constexpr char kLeft[] = "left";  // the beat of a rank whose communicators are destroyed
constexpr size_t kMaxFormer = 4096;

std::string RankKey(int world_rank) { return absl::StrCat("rank/", world_rank); }

// A rank's own line in the Store, the number of the beat first:
// "12;world\t5\t4\tAllReduce;world/1\t...".
std::string GroupField(const std::string& name, uint64_t issued, uint64_t completed,
                       const std::string& last) {
  return absl::StrCat(";", name, "\t", issued, "\t", completed, "\t", last);
}

// Fills in what `line` says of the group `name`.
void ParseProgress(const std::string& line, const std::string& name, RankProgress& progress) {
  for (const auto& field : absl::StrSplit(line, ';')) {
    const std::vector<std::string> parts = absl::StrSplit(field, '\t');
    if (parts.size() != 4 || parts[0] != name) continue;
    if (absl::SimpleAtoi(parts[1], &progress.issued)) progress.last_issued = parts[3];
  }
}

absl::Status GoneError(const std::string& what) {
  return absl::UnavailableError(
      absl::StrCat("rank 0 has ended or cannot be reached: it serves the store, and ", what));
}

absl::Status DeadlineErrorBecause(const Operation& operation, const std::string& communicator,
                                  int rank, int size, absl::Duration waited,
                                  const std::string& why) {
  return absl::DeadlineExceededError(
      absl::StrCat(operation.ToString(), " of communicator ", communicator, " on rank ", rank,
                   " of ", size, " is not done after ",
                   absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))), ": ", why));
}

}  // namespace

absl::Status DeadlineError(const Operation& operation, const std::string& communicator, int rank,
                           int size, absl::Duration waited,
                           const std::vector<RankProgress>& missing) {
  std::vector<std::string> ranks;
  for (const RankProgress& progress : missing) {
    std::string text = absl::StrCat("rank ", progress.rank);
    if (progress.issued == 0) {
      absl::StrAppend(&text, " (has issued nothing here");
    } else {
      absl::StrAppend(&text, " (last issued ", progress.last_issued, " #", progress.issued);
    }
    absl::StrAppend(&text, progress.left ? "; has left: its communicator is destroyed)"
                           : progress.silent
                               ? "; gives no sign of life: stopped, killed or cut off)"
                               : "; alive)");
    ranks.push_back(text);
  }
  return DeadlineErrorBecause(
      operation, communicator, rank, size, waited,
      ranks.empty()
          ? "all ranks have arrived, so the transfer itself does not end; have they issued "
            "the same? LOCKSTEP_COMM_DEBUG=detail checks that"
          : absl::StrCat("waiting for ", absl::StrJoin(ranks, ", ")));
}

// What the thread works on; it may outlive the ControlPlane.
struct ControlPlane::Shared {
  Shared(std::shared_ptr<Store> store, int world_rank, Options options)
      : store(std::move(store)), world_rank(world_rank), options(options) {}

  const std::shared_ptr<Store> store;
  const int world_rank;
  const Options options;

  std::mutex mutex;
  std::condition_variable wake;      // for the thread
  std::condition_variable answered;  // for who waits for it
  bool stop = false;
  bool stopped = false;
  std::optional<absl::Status> aborted;   // the first reason of all
  std::set<std::string> told;            // names of groups whose on_abort has run, or runs
  std::optional<absl::Status> to_abort;  // to be told to the Store
  bool telling = false;                  // it is being told, or departures are
  std::map<std::string, std::weak_ptr<ControlGroup>> groups;
  std::string former;                                         // fields of groups that are no more
  std::vector<std::pair<std::string, Departure>> departures;  // to be told to the Store
  std::vector<int> wanted;         // world ranks that somebody asks about
  std::vector<std::string> lines;  // their lines
  bool has_answer = false;

  // Needs the mutex.
  bool MustTell() const { return to_abort.has_value() || !departures.empty(); }

  void Run();
  absl::Status Beat(const std::string& beat);
  absl::Status TellStore(const absl::Status& reason);
  void TellGroups(const absl::Status& reason);
};

void ControlPlane::Shared::Run() {
  for (uint64_t beat = 1;; ++beat) {
    if (absl::Status status = Beat(absl::StrCat(beat)); !status.ok()) {
      TellGroups(GoneError(std::string{status.message()}));
    }
    std::unique_lock<std::mutex> lock(mutex);
    wake.wait_for(lock, absl::ToChronoMilliseconds(options.interval),
                  [this] { return stop || MustTell() || !wanted.empty(); });
    if (stop && !MustTell()) {
      lock.unlock();
      static_cast<void>(Beat(kLeft));
      lock.lock();
      stopped = true;
      answered.notify_all();
      return;
    }
  }
}

absl::Status ControlPlane::Shared::TellStore(const absl::Status& reason) {
  absl::StatusOr<int64_t> count = store->Add(kAbortCountKey, 1);
  if (!count.ok() || *count != 1) return count.status();
  return store->Set(kAbortKey,
                    absl::StrCat("rank ", world_rank, ": ", std::string{reason.message()}));
}

absl::Status ControlPlane::Shared::Beat(const std::string& beat) {
  std::string line = beat;
  std::vector<int> ask;
  std::optional<absl::Status> abort;
  std::vector<std::shared_ptr<ControlGroup>> living;  // their destructor takes the mutex
  std::vector<std::pair<std::string, Departure>> leaving;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [name, weak] : groups) {
      if (std::shared_ptr<ControlGroup> group = weak.lock()) {
        living.push_back(group);
        const uint64_t issued = group->issued_.load(std::memory_order_acquire);
        absl::StrAppend(&line, GroupField(name, issued, group->completed_.load(),
                                          Name(group->last_kind_.load())));
      }
    }
    absl::StrAppend(&line, former);
    ask = wanted;
    abort.swap(to_abort);
    leaving.swap(departures);
    telling = abort.has_value() || !leaving.empty();
  }
  if (abort || !leaving.empty()) {
    absl::Status status = abort ? TellStore(*abort) : absl::OkStatus();
    for (const auto& [name, departure] : leaving) {
      if (status.ok()) status = WriteDeparture(*store, name, departure);
    }
    std::lock_guard<std::mutex> lock(mutex);
    telling = false;
    answered.notify_all();
    if (!status.ok()) return status;
  }
  if (absl::Status status = store->Set(RankKey(world_rank), line); !status.ok()) return status;
  if (!ask.empty()) {
    std::vector<std::string> found;
    for (int rank : ask) {
      auto value = store->TryGet(RankKey(rank));
      if (!value.ok()) return value.status();
      found.push_back(value->value_or(""));
    }
    std::lock_guard<std::mutex> lock(mutex);
    lines = std::move(found);
    wanted.clear();
    has_answer = true;
    answered.notify_all();
  }
  auto reason = store->TryGet(kAbortKey);
  if (!reason.ok()) return reason.status();
  if (reason->has_value()) {
    TellGroups(absl::AbortedError("aborted by " + **reason));
    return absl::OkStatus();
  }
  for (const auto& group : living) {
    if (absl::Status status = group->LookWhoLeft(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Each once: those that join later are told at the next beat.
void ControlPlane::Shared::TellGroups(const absl::Status& reason) {
  absl::Status first;
  std::vector<std::shared_ptr<ControlGroup>> living;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!aborted) aborted = reason;
    first = *aborted;
    for (const auto& [name, weak] : groups) {
      std::shared_ptr<ControlGroup> group = weak.lock();
      if (group != nullptr && told.insert(name).second) living.push_back(std::move(group));
    }
  }
  for (const auto& group : living) group->on_abort_(first);
}

ControlPlane::ControlPlane(std::shared_ptr<Store> store, int world_rank)
    : ControlPlane(std::move(store), world_rank, Options()) {}

ControlPlane::ControlPlane(std::shared_ptr<Store> store, int world_rank, Options options)
    : shared_(std::make_shared<Shared>(std::move(store), world_rank, options)),
      thread_([shared = shared_] { shared->Run(); }) {}

ControlPlane::~ControlPlane() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->stop = true;
  shared_->wake.notify_all();
  // The Store may hang, when rank 0 has been stopped: leave the thread to it.
  const bool ended =
      shared_->answered.wait_for(lock, absl::ToChronoMilliseconds(2 * shared_->options.interval),
                                 [this] { return shared_->stopped; });
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

std::shared_ptr<ControlGroup> ControlPlane::Join(
    const std::string& name, std::vector<int> world_ranks,
    std::function<void(const absl::Status&)> on_abort) {
  std::shared_ptr<ControlGroup> group(
      new ControlGroup(shared_, name, std::move(world_ranks), std::move(on_abort)));
  std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->groups[name] = group;
  return group;
}

void ControlPlane::Abort(const absl::Status& reason) {
  shared_->TellGroups(reason);
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->to_abort = reason;
  shared_->wake.notify_all();
  if (std::this_thread::get_id() == thread_.get_id()) return;  // in on_abort of a group
  shared_->answered.wait_for(lock, absl::ToChronoMilliseconds(2 * shared_->options.interval),
                             [this] { return !shared_->to_abort && !shared_->telling; });
}

void ControlPlane::Leave() {
  std::vector<std::shared_ptr<ControlGroup>> living;
  std::unique_lock<std::mutex> lock(shared_->mutex);
  for (const auto& [name, weak] : shared_->groups) {
    if (std::shared_ptr<ControlGroup> group = weak.lock()) {
      group->Leave();
      living.push_back(std::move(group));
    }
  }
  shared_->answered.wait_for(lock, absl::ToChronoMilliseconds(2 * shared_->options.interval),
                             [this] { return !shared_->MustTell() && !shared_->telling; });
  lock.unlock();  // before the groups go
}

ControlGroup::ControlGroup(std::shared_ptr<ControlPlane::Shared> shared, std::string name,
                           std::vector<int> world_ranks,
                           std::function<void(const absl::Status&)> on_abort)
    : shared_(std::move(shared)),
      name_(std::move(name)),
      world_ranks_(std::move(world_ranks)),
      rank_(static_cast<int>(
          std::find(world_ranks_.begin(), world_ranks_.end(), shared_->world_rank) -
          world_ranks_.begin())),
      on_abort_(std::move(on_abort)) {}

ControlGroup::~ControlGroup() {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  if (shared_->former.size() > kMaxFormer) shared_->former.clear();
  shared_->former += GroupField(name_, issued_, completed_, Name(last_kind_.load()));
  Leave();
}

void ControlGroup::Leave() {
  if (world_ranks_.size() == 1 || std::exchange(left_, true)) return;
  shared_->departures.push_back({name_, Departure{rank_, Counts()}});
  shared_->wake.notify_all();
}

void ControlGroup::Issued(const Operation& operation) {
  started_.fetch_add(1, std::memory_order_relaxed);
  if (IsCollective(operation.kind)) {
    last_kind_.store(operation.kind, std::memory_order_relaxed);
    issued_.store(operation.sequence, std::memory_order_release);
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    transfers_.Add(operation);
  }
}

IssuedCounts ControlGroup::Counts() {
  std::lock_guard<std::mutex> lock(mutex_);
  IssuedCounts counts = transfers_;
  counts.collectives = issued_.load(std::memory_order_acquire);
  return counts;
}

absl::Status ControlGroup::LookWhoLeft() {
  // Where nothing is pending, nobody waits for one who has left.
  if (completed_.load(std::memory_order_relaxed) == started_.load(std::memory_order_relaxed)) {
    return absl::OkStatus();
  }
  std::vector<Departure> known = departures_;  // changed by this thread alone
  absl::Status status = ReadDepartures(*shared_->store, name_, known);
  std::lock_guard<std::mutex> lock(mutex_);
  departures_ = std::move(known);
  some_left_.store(!departures_.empty(), std::memory_order_release);
  return status;
}

absl::Status ControlGroup::Deserted(const Operation& operation) {
  const IssuedCounts issued = Counts();
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Departure& departure : departures_) {
    if (IsDeserted(operation, rank_, issued, departure)) {
      return DesertedError(operation, name_, rank_, static_cast<int>(world_ranks_.size()),
                           departure);
    }
  }
  return absl::OkStatus();
}

void ControlGroup::Completed() { completed_.fetch_add(1, std::memory_order_relaxed); }

std::optional<std::vector<std::string>> ControlGroup::AskPeers() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->wanted = world_ranks_;
  shared_->has_answer = false;
  shared_->wake.notify_all();
  if (!shared_->answered.wait_for(lock, absl::ToChronoMilliseconds(3 * shared_->options.interval),
                                  [this] { return shared_->has_answer; })) {
    return std::nullopt;
  }
  return shared_->lines;
}

absl::Status ControlGroup::Deadline(const Operation& operation, absl::Duration waited) {
  const int size = static_cast<int>(world_ranks_.size());
  const auto before = AskPeers();
  absl::SleepFor(2.5 * shared_->options.interval);
  const auto after = before ? AskPeers() : std::nullopt;
  if (!after) {
    return DeadlineErrorBecause(
        operation, name_, rank_, size, waited,
        "world rank 0, which serves the store, gives no sign of life: stopped, killed or cut off");
  }
  std::vector<RankProgress> missing;
  for (int i = 0; i < size; ++i) {
    if (i == rank_) continue;
    RankProgress progress{.rank = i};
    ParseProgress((*after)[i], name_, progress);
    progress.silent = (*before)[i] == (*after)[i];
    progress.left = absl::StartsWith((*after)[i], kLeft);
    const bool arrived =
        IsCollective(operation.kind) ? progress.issued >= operation.sequence : i != operation.peer;
    if (!arrived || progress.silent) missing.push_back(std::move(progress));
  }
  return DeadlineError(operation, name_, rank_, size, waited, missing);
}

absl::Status ControlGroup::CheckSame(const Operation& operation, absl::Duration timeout) {
  const int size = static_cast<int>(world_ranks_.size());
  const auto key = [&](uint64_t sequence, int of) {
    return absl::StrCat("detail/", name_, "/", sequence, "/", of);
  };
  const std::string mine = operation.Signature();
  Store& store = *shared_->store;
  if (absl::Status status = store.Set(key(operation.sequence, rank_), mine); !status.ok()) {
    return status;
  }
  const absl::Time deadline = absl::Now() + timeout;
  std::map<std::string, std::vector<std::string>> ranks_by_signature;
  for (int i = 0; i < size; ++i) {
    auto theirs = store.Get(key(operation.sequence, i),
                            std::max(deadline - absl::Now(), absl::ZeroDuration()));
    if (absl::IsDeadlineExceeded(theirs.status())) return Deadline(operation, timeout);
    if (!theirs.ok()) return theirs.status();
    ranks_by_signature[*theirs].push_back(absl::StrCat(i));
  }
  // Who has issued this one has seen the one before everywhere, so nobody reads the one before
  // that.
  if (operation.sequence > 2) {
    if (absl::Status s = store.Delete(key(operation.sequence - 2, rank_)); !s.ok()) return s;
  }
  if (ranks_by_signature.size() == 1) return absl::OkStatus();
  std::vector<std::string> parts;
  for (const auto& [signature, ranks] : ranks_by_signature) {
    parts.push_back(absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "),
                                 ": ", signature));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the ranks of communicator ", name_, " issued different operations as #",
                   operation.sequence, ": ", absl::StrJoin(parts, "; ")));
}

bool DetailMode() {
  const char* value = std::getenv("LOCKSTEP_COMM_DEBUG");
  return value != nullptr && std::string(value) == "detail";
}

}  // namespace lockstep::comm
