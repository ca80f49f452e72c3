#include "lockstep/parallel/fsdp/fsdp_build_scope.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "lockstep/parallel/fsdp/sharded_unit.h"
#include "lockstep/parallel/strategy.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {

FsdpBuildScope::FsdpBuildScope(comm::Communicator& comm, FsdpOptions options)
    : context_(std::make_unique<fsdp::ShardContext>(comm, options)) {
  observing_.emplace(static_cast<UnitObserver*>(this));  // private base
}

FsdpBuildScope::~FsdpBuildScope() = default;

void FsdpBuildScope::Built(UnitModule& unit) {
  if (context_ == nullptr) {
    throw StatusError(absl::FailedPreconditionError(
        "a Unit was constructed in an FsdpBuildScope that an Fsdp has taken: make another scope"));
  }
  std::vector<NamedTensor> own;
  std::vector<std::string> others;
  for (const auto& parameter : unit.module().named_parameters()) {
    if (sharded_.insert(parameter.value().unsafeGetTensorImpl()).second) {
      own.push_back({parameter.key(), parameter.value()});
    } else {
      others.push_back(parameter.key());
    }
  }
  if (context_->options().sync_module_states) {
    BroadcastModel(unit.module(), context_->world(), others);
  }
  groups_.push_back(fsdp::ShardParameters(own, *context_));
}

}  // namespace lockstep::parallel
