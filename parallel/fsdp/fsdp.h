#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/fsdp/fsdp_options.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel {

class FsdpBuildScope;

namespace fsdp {
class FlatGroup;
class ShardContext;
class ShardedModel;
}  // namespace fsdp

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
// while backward goes on, and averaged shards stay. While one Unit computes, the one that came next
// in the last step is gathered. The model itself must be a Unit; what it owns is gathered once a
// step, as backward needs it right after forward. Options: fsdp_options.h; a model that one rank
// has no room for: fsdp_build_scope.h.
//
// OPTIMIZERS get each parameter as this rank's 1-D slice of it, under its name, empty where the
// rank has none. Only elementwise ones (SGD, Adam, AdamW, ...) are exact on slices; a rule such as
// "decay only if ndim >= 2" must go by name. Gradients appear in the slices' .grad; the model's own
// parameters have none, and throw when somebody looks for them there after a backward.
//
// MEMORY a rank, fp32 and AdamW, with Ψ parameters: 16 Ψ / N bytes and padding between steps;
// during a step also activations, the model's own parameters and gradients, two unsharded Units and
// two gradient Units (three unsharded ones where some parameters are frozen), and Units around
// these. PAYLOAD a step and rank: 4 Ψ bytes
// reduce-scattered, 4 (2 Ψ - Ψ_root) all-gathered, padding apart; 4 Ψ all-gathered with
// reshard_after_forward false and with the other Shardings.
//
// USES. A Unit may be used several times in a forward, and there may be several forwards before a
// backward. Ranks must use the same Units in the same order, and give gradients to the same
// parameters: where one does not, that is an error, which names the Unit (found by comparing
// labels, see AllGatherInto: across nodes with LOCKSTEP_COMM_DEBUG=detail). A Unit that no rank
// uses in a step gets no gradient, nor does a parameter. Units with frozen parameters, which
// backward may need to its end, are freed when their inputs have their gradients, and at the end of
// backward where no input requires one, theirs or that of a Unit inside; Units without, when their
// gradients are there: a second use of a parameter by detach(), whose backward may come later, is
// an error then. Parameters are frozen and unfrozen before Fsdp is made. A parameter that several
// Units share belongs to the innermost Unit around all of them.
//
// BETWEEN steps the model's parameters have no memory: whoever touches them gets an exception that
// says so. Read and write them by VisitState() and UpdateState(), or between Unshard() and
// Reshard(). Copies made of a parameter before sharding (detach()) are not sharded, and gradients
// that the model has are dropped. With NoSync(), see FsdpOptions::no_sync. A strategy outlives the
// backwards of its forwards; after it the model has no weights: UpdateState() reads them out
// before.
//
// Errors (StatusError): options that do not go together; the model is no Unit; a Unit whose forward
// returns no tensor that hooks see; sparse gradients; a forward after a backward that ended with an
// exception; the communicator failed. c10::Error: a parameter used while it is sharded, and a
// gradient read from the model.
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

  // Of a model that was built in `scope`, with the scope's options.
  Fsdp(std::shared_ptr<torch::nn::Module> model, FsdpBuildScope& scope);

  template <typename Impl>
  Fsdp(const torch::nn::ModuleHolder<Impl>& model, FsdpBuildScope& scope)
      : Fsdp(std::shared_ptr<torch::nn::Module>(model.ptr()), scope) {}

  ~Fsdp() override;

  std::string name() const override;
  at::Tensor SumOverShards(at::Tensor value) override;
  void UpdateState(const StateUpdater& update) override;
  void UpdateFull(const std::vector<NamedTensor>& tensors, const StateUpdater& update) override;

  // Parameters' `local` are the optimizer's slices. What is gathered counts as out of date.
  std::vector<StateShard> StateShards() override;

  // Gathers a Unit's own parameters ("" is the model's own Unit, see FindUnits) and keeps them
  // until Reshard() or the end of a backward that reduces gradients; call it after the optimizer's
  // step. Without `wait` this only issues the all-gather, for the Unit's forward to find it done.
  // Changes made to them are lost: UpdateState() keeps them. Collective.
  void Unshard(const std::string& unit, bool wait = true);
  void Reshard(const std::string& unit);

  // Forgets the gradients that NoSync() has left for the next backward to reduce, which are not in
  // parameters() yet, so that zero_grad() does not reach them.
  void DropGradients();

 private:
  Fsdp(std::shared_ptr<torch::nn::Module> model, std::unique_ptr<fsdp::ShardContext> context,
       std::vector<std::vector<fsdp::FlatGroup>> built);

  const std::unique_ptr<fsdp::ShardContext> context_;
  std::unique_ptr<fsdp::ShardedModel> sharded_;
};

}  // namespace lockstep::parallel
