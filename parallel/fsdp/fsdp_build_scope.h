#pragma once

#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/fsdp/fsdp_options.h"
#include "lockstep/parallel/unit.h"

namespace lockstep::parallel {

namespace fsdp {
class FlatGroup;
class ShardContext;
}  // namespace fsdp

// Builds a model that no rank has room for: while the scope lives, each Unit that this thread
// constructs is sharded when its constructor ends, inner Units first.
//
//   parallel::FsdpBuildScope scope(comm, options);
//   torch::manual_seed(0);
//   Net model;
//   parallel::Fsdp fsdp(model, scope);             // as ever from here on; the scope is spent
//
// WEIGHTS are those that one process would have built with that seed, or with sync_module_states
// those of rank 0. MEMORY while building is the shards, the Unit that is being constructed, and
// what the Units around it have of their own so far. All ranks construct the same Units in the same
// order: each is a collective.
//
// A Unit is complete when its constructor ends: who changes its parameters later (an initialisation
// of the whole model, to(dtype)) gets an exception that they are sharded. Initialise a Unit in its
// own constructor, or the whole by Fsdp::UpdateState(). Parameters that Units come to share, and
// those whose requires_grad has changed, are gathered once more when Fsdp is made, to be sharded
// with the Unit that they belong to then.
class FsdpBuildScope : private UnitObserver {
 public:
  explicit FsdpBuildScope(comm::Communicator& comm, FsdpOptions options = {});
  ~FsdpBuildScope() override;
  FsdpBuildScope(const FsdpBuildScope&) = delete;
  FsdpBuildScope& operator=(const FsdpBuildScope&) = delete;

 private:
  friend class Fsdp;

  void Built(UnitModule& unit) override;

  std::unique_ptr<fsdp::ShardContext> context_;
  std::vector<std::vector<fsdp::FlatGroup>> groups_;  // of each Unit, in the order of building
  std::unordered_set<const void*> sharded_;           // parameters, by their TensorImpl
  std::optional<UnitObserverScope> observing_;
};

}  // namespace lockstep::parallel
