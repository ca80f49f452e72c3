#include "lockstep/parallel/ddp/ddp.h"

#include <utility>

#include "lockstep/parallel/ddp/reducer.h"

namespace lockstep::parallel {

Ddp::Ddp(std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm, DdpOptions options)
    : Strategy(std::move(model)), comm_(SplitPrivate(comm)) {
  BroadcastModel(this->model(), *comm_);
  reducer_ = std::make_unique<ddp::Reducer>(
      named_parameters(), *comm_, options, [this] { return sync(); },
      [this](const StepStatistics& step) { set_last_step(step); });
}

Ddp::~Ddp() = default;

}  // namespace lockstep::parallel
