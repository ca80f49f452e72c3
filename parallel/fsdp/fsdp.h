#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel {

struct FsdpOptions {
  bool sync_module_states = true;  // start from rank 0's parameters and buffers on all ranks; true
};

// Fully sharded data parallelism (ZeRO-3): every rank keeps 1/N of the parameters, gradients and
// optimizer state, and gathers the parameters of one Unit at a time when they are needed.
//
//   using Block = parallel::Unit<BlockImpl>;
//   using Net = parallel::Unit<NetImpl>;            // a model of Blocks; itself a Unit
//   Net model;
//   parallel::Fsdp fsdp(model, comm);               // shards it in place
//   torch::optim::AdamW optimizer(fsdp.parameters(), 1e-3);   // after sharding
//   ... the loop of Ddp ...
//
// A Unit's parameters (those below it that no inner Unit has) live in flat buffers, one for each
// dtype and requires_grad. Before a Unit's forward, and again before its backward, they are
// all-gathered; after each they are freed. After its backward their gradients are reduce-scattered
// while backward goes on, and averaged shards stay. The model itself must be a Unit; what it owns
// is gathered once a step, as backward needs it right after forward.
//
// OPTIMIZERS get each parameter as this rank's 1-D slice of it, under its name, empty where the
// rank has none. Only elementwise ones (SGD, Adam, AdamW, ...) are exact on slices; a rule such as
// "decay only if ndim >= 2" must go by name. Gradients appear in the slices' .grad; the model's own
// parameters have none.
//
// MEMORY a rank, fp32 and AdamW, with Ψ parameters: 16 Ψ / N bytes and padding between steps;
// during a step also activations, the model's own parameters, two unsharded Units and two gradient
// Units. PAYLOAD a step and rank: 4 Ψ bytes reduce-scattered, 4 (2 Ψ - Ψ_root) all-gathered,
// padding apart.
//
// Units with frozen parameters, which backward may need to its end, stay gathered until then.
//
// BETWEEN steps the model's parameters have no memory: read and write them by VisitState() and
// UpdateState(). NoSync() reduces each backward and accumulates the shards: communication stays,
// memory does not grow. A Unit that one rank uses in a step, all ranks must use. Copies made of a
// parameter before sharding (detach(), tensors of an optimizer built too early) are not sharded,
// and gradients that the model has are dropped. A strategy outlives the backwards of its forwards;
// after it the model has no weights: UpdateState() reads them out before.
//
// Errors (StatusError): the model is no Unit; a Unit whose forward returns no tensor that hooks
// see; a forward after a backward that ended with an exception; the communicator failed.
//
// See Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023,
// and Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
// 2020.
class Fsdp : public Strategy {
 public:
  Fsdp(std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm,
       FsdpOptions options = {});

  template <typename Impl>
  Fsdp(const torch::nn::ModuleHolder<Impl>& model, comm::Communicator& comm,
       FsdpOptions options = {})
      : Fsdp(std::shared_ptr<torch::nn::Module>(model.ptr()), comm, options) {}

  ~Fsdp() override;

  std::string name() const override { return "fsdp"; }
  double SumOverShards(double value) override;
  void UpdateState(const StateUpdater& update) override;
  std::vector<StateShard> StateShards() override;

 private:
  class State;
  std::unique_ptr<comm::Communicator> comm_;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::parallel
