#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/comm/control_plane.h"
#include "lockstep/comm/nccl/lane.h"
#include "lockstep/comm/nccl/world.h"

// A communicator as its operations see it. Private to this folder.
namespace lockstep::comm::nccl {

// Operations of one rank. It lives until its communicator is destroyed and what that issued is
// done.
//
// Collectives share a lane. NCCL carries out what is in one communicator one after another, so a
// Send would hold back the Recv behind it, and NCCL knows no tags: each (source, destination, tag)
// that is used gets a lane of its own, a communicator of two ranks that connects at the first use.
struct Group : std::enable_shared_from_this<Group> {
  Group(std::shared_ptr<World> world, std::shared_ptr<Lane> lane, std::string name, int rank,
        std::vector<int> world_ranks);
  ~Group();

  int size() const { return static_cast<int>(world_ranks.size()); }

  Work Issue(Operation operation);
  void StartAfter(const Work& work);

  // The lane of a part; null for color -1.
  absl::StatusOr<std::shared_ptr<Lane>> SplitLane(int color, int key, absl::Time deadline);

  const std::shared_ptr<World> world;
  const std::shared_ptr<Lane> lane;
  const std::string name;
  const int rank;
  const std::vector<int> world_ranks;
  std::shared_ptr<ControlGroup> control;

  std::mutex mutex;
  uint64_t splits = 0;  // guarded by mutex

 private:
  // A work that later operations wait for on the device.
  class Fence;
  using Fences = std::vector<std::shared_ptr<Fence>>;
  using ChannelKey = std::tuple<int, int, int>;  // source, destination, tag

  // These need the mutex.
  absl::Status Enqueue(const std::shared_ptr<State>& state);
  absl::StatusOr<std::shared_ptr<Lane>> ChannelOf(const ChannelKey& key);
  absl::Status EnqueueToSelf(const std::shared_ptr<State>& state);

  // Jobs of lanes.
  absl::Status StartCollective(State& state, const Fences& fences);
  absl::Status StartTransfer(const Lane& channel, State& state, const Fences& fences);
  absl::Status CopyToSelf(const Lane& channel, State& send, State& recv, const Fences& fences);
  absl::Status Connect(const ChannelKey& key, Lane& channel);

  absl::Status WaitForInputs(Stream stream, State& state, const Fences& fences);
  absl::StatusOr<UniqueId> AgreeOnId(const ChannelKey& key);

  // The error of an operation that could not be started.
  absl::Status StartError(State& state, const absl::Status& status);

  std::string Describe(const Operation& operation) const;

  // Guarded by the mutex.
  uint64_t collectives_ = 0;
  uint64_t transfers_ = 0;
  Fences fences_;
  std::map<ChannelKey, std::shared_ptr<Lane>> channels_;
  std::map<int, std::deque<std::shared_ptr<State>>> to_self_;  // by tag: Sends or Recvs
  at::Tensor scratch_;
};

// Makes a group's part of the control plane.
void JoinControlPlane(Group& group);

}  // namespace lockstep::comm::nccl
