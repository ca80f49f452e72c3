#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lockstep/comm/nccl/handle.h"
#include "lockstep/comm/nccl/world.h"

// Private to this folder.
namespace lockstep::comm::nccl {

// A handle and the thread that uses it, which starts its operations in order and closes it. A call
// of NCCL's is over only when the other ranks have made theirs too wherever it has something to
// connect: at the first operations of a communicator, and later ones where another algorithm is
// chosen. Who issues an operation must not wait for that, nor may other handles.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  using Job = std::function<absl::Status()>;

  // Makes a handle that the world's watchdog knows, and starts the thread.
  static absl::StatusOr<std::shared_ptr<Lane>> Open(std::shared_ptr<World> world);

  // Runs `job` behind those before it. Its error breaks the world. In a broken world jobs are
  // dropped.
  void Push(Job job);

  // The same, and returns what it does; the world's error where it was dropped.
  absl::Status Run(Job job);

  // After the last job the thread closes the handle and ends. Does not wait for it.
  void Close();

  Handle& handle() const { return *handle_; }

 private:
  Lane(std::shared_ptr<World> world, std::shared_ptr<Handle> handle);

  void Work();
  bool Take(Job& job);  // false: there will be none
  void CloseHandle();

  const std::shared_ptr<World> world_;
  const std::shared_ptr<Handle> handle_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool closing_ = false;
  bool ended_ = false;
};

}  // namespace lockstep::comm::nccl
