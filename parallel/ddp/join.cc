#include "lockstep/parallel/ddp/join.h"

#include <ATen/ops/full.h>

#include "lockstep/parallel/ddp/reducer.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {

Join::Join(Ddp& ddp, JoinOptions options) : ddp_(ddp), first_step_(ddp.reducer_->steps()) {
  ddp_.reducer_->BeginJoin(options.divide_by_active_ranks);
}

Join::~Join() { ddp_.reducer_->EndJoin(); }

void Join::Finish() {
  ddp::Reducer& reducer = *ddp_.reducer_;
  comm::Communicator& comm = reducer.comm();
  while (reducer.Shadow()) {
  }
  // The most steps win, then the lowest rank.
  const int64_t steps = reducer.steps() - first_step_;
  at::Tensor best = at::full({}, steps * comm.size() + comm.size() - 1 - comm.rank(),
                             at::TensorOptions(at::kLong).device(comm.device()));
  ThrowIfError(comm.AllReduce(best, comm::ReduceOp::kMax).Wait());
  const auto root = static_cast<int>(comm.size() - 1 - best.item<int64_t>() % comm.size());
  BroadcastModel(ddp_.model(), comm, ddp_.ignored_, root);
}

}  // namespace lockstep::parallel
