#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/comm/control_plane.h"
#include "lockstep/comm/nccl/handle.h"
#include "lockstep/comm/nccl/world.h"

// A communicator as its operations see it. Private to this folder.
namespace lockstep::comm::nccl {

// Operations of one rank. It lives until its communicator is destroyed and what that issued is
// done.
//
// Collectives share the handle's stream. NCCL carries out what is in one communicator one after
// another, so a Send would hold back the Recv behind it, and NCCL knows no tags: each (source,
// destination, tag) that is used gets a channel, a communicator of two ranks with a stream of its
// own, which a thread makes at the first use.
struct Group : std::enable_shared_from_this<Group> {
  Group(std::shared_ptr<World> world, std::shared_ptr<Handle> handle, std::string name, int rank,
        std::vector<int> world_ranks);
  ~Group();

  int size() const { return static_cast<int>(world_ranks.size()); }

  Work Issue(Operation operation);
  void StartAfter(const Work& work);

  // The communicators of NCCL of a Split; null for color -1.
  absl::StatusOr<std::shared_ptr<Handle>> SplitHandle(int color, int key, absl::Time deadline);

  const std::shared_ptr<World> world;
  const std::shared_ptr<Handle> handle;
  const std::string name;
  const int rank;
  const std::vector<int> world_ranks;
  std::shared_ptr<ControlGroup> control;

  std::mutex mutex;
  uint64_t splits = 0;  // guarded by mutex

 private:
  struct Queued {
    std::optional<Work> after;
    std::shared_ptr<State> state;
  };
  struct Channel {
    std::shared_ptr<Handle> handle;
    bool ready = false;
    std::deque<std::shared_ptr<State>> waiting;
  };
  using ChannelKey = std::tuple<int, int, int>;  // source, destination, tag

  void Drain();

  // These need the mutex.
  absl::Status StartQueued();
  absl::Status Start(const std::shared_ptr<State>& state);
  absl::Status StartCollective(State& state);
  absl::Status StartTransfer(const std::shared_ptr<State>& state);
  absl::Status StartOnChannel(Channel& channel, State& state);
  absl::Status CopyToSelf(const std::shared_ptr<State>& state);
  absl::Status WaitForInputs(Stream stream, State& state);

  void ConnectInBackground(const ChannelKey& key);
  absl::Status Connect(const ChannelKey& key);
  absl::StatusOr<UniqueId> AgreeOnId(const ChannelKey& key);

  std::string Describe(const Operation& operation) const;

  // Guarded by the mutex.
  uint64_t collectives_ = 0;
  uint64_t transfers_ = 0;
  std::deque<Queued> queue_;
  std::vector<std::shared_ptr<State>> fences_;  // what later operations wait for on the device
  std::map<ChannelKey, Channel> channels_;
  std::map<int, std::deque<std::shared_ptr<State>>> to_self_;  // by tag: Sends or Recvs
  at::Tensor scratch_;
};

// Makes a group's part of the control plane.
void JoinControlPlane(Group& group);

}  // namespace lockstep::comm::nccl
