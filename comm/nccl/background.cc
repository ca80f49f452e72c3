#include "lockstep/comm/nccl/background.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/time/clock.h"

namespace lockstep::comm::nccl {
namespace {

constexpr absl::Duration kMaxExit = absl::Seconds(10);  // for NCCL to abort, or to close

struct Threads {
  std::mutex mutex;
  std::condition_variable ended;
  std::list<std::weak_ptr<World>> running;  // by thread
  std::atomic<bool> exiting{false};

  static Threads& Get() {
    static auto* threads = [] {
      // Before CUDA goes, which was there before.
      std::atexit([] { Get().AwaitAtExit(); });
      return new Threads;
    }();
    return *threads;
  }

  void AwaitAtExit() {
    exiting = true;
    const absl::Time start = absl::Now();
    std::unique_lock<std::mutex> lock(mutex);
    while (std::any_of(running.begin(), running.end(), [&](const auto& weak) {
      const std::shared_ptr<World> world = weak.lock();
      if (world == nullptr || world->is_broken()) return absl::Now() < start + kMaxExit;
      return world->HasPending() || absl::Now() < start + world->MaxFlush() + kMaxExit;
    })) {
      ended.wait_for(lock, std::chrono::milliseconds(100));
    }
  }
};

}  // namespace

void RunInBackground(const std::shared_ptr<World>& world, std::function<void()> body) {
  Threads& threads = Threads::Get();
  std::list<std::weak_ptr<World>>::iterator place;
  {
    std::lock_guard<std::mutex> lock(threads.mutex);
    place = threads.running.insert(threads.running.end(), world);
  }
  std::thread([&threads, place, body = std::move(body)]() mutable {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, /*oldset=*/nullptr);  // handlers run on the program's threads
    body();
    body = nullptr;  // what it holds goes before the thread counts as ended
    std::lock_guard<std::mutex> lock(threads.mutex);
    threads.running.erase(place);
    threads.ended.notify_all();
  }).detach();
}

bool IsExiting() { return Threads::Get().exiting.load(); }

bool WaitForBackground(absl::Duration timeout) {
  Threads& threads = Threads::Get();
  std::unique_lock<std::mutex> lock(threads.mutex);
  const auto none = [&] { return threads.running.empty(); };
  if (timeout == absl::InfiniteDuration()) {
    threads.ended.wait(lock, none);
    return true;
  }
  return threads.ended.wait_for(lock, absl::ToChronoMicroseconds(timeout), none);
}

}  // namespace lockstep::comm::nccl
