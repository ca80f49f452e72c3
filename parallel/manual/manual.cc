#include "lockstep/parallel/manual/manual.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include "lockstep/tools/device/stream_time.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/recorder.h"

namespace lockstep::parallel {

Manual::Manual(std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm)
    : Strategy(std::move(model), &comm), comm_(SplitPrivate(comm)) {
  CheckSameModel(this->model(), *comm_);
  BroadcastModel(this->model(), *comm_);
}

void Manual::FinishBackward() {
  if (!sync()) return;
  at::NoGradGuard no_grad;
  StepStatistics step;
  const device::StreamTime begin(comm_->device());
  for (const NamedTensor& parameter : named_parameters()) {
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter.tensor);
    if (!gradient.is_contiguous()) gradient = gradient.contiguous();
    const trace::Span span("WAIT_FOR_COMMUNICATION", "communication");
    ThrowIfError(comm_->AllReduce(gradient, comm::ReduceOp::kAverage).Wait());
    ++step.collectives;
    step.payload_bytes += static_cast<int64_t>(gradient.nbytes());
  }
  const device::StreamTime end(comm_->device());
  set_last_step([step, begin, end]() mutable {
    step.communication = step.exposed = Elapsed(begin, end);
    return step;
  });
}

}  // namespace lockstep::parallel
