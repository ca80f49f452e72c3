#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel::optim {

// The trainable parameters of a module that no strategy holds, each once, by name.
std::vector<NamedTensor> NamedParameters(const torch::nn::Module& module);

// Other options for the parameters whose names `matches` accepts.
template <typename Options>
struct ParameterGroup {
  std::function<bool(const std::string& name)> matches;
  Options options;
};

// What FusedAdamW and FusedSgd share. Both are torch::optim::Optimizers, so that zero_grad(),
// step(closure) and LibTorch's learning rate schedulers work on them, and compute what
// torch::optim::AdamW and SGD compute; but LibTorch's fused kernels pass over memory once a
// parameter, where its own optimizers make a dozen passes and allocate in each. Parameters,
// gradients and state are f32, f64, f16 or bf16, mixed as they come, state in the parameter's
// dtype.
//
// GROUPS. Group 0 has the options given to the constructor; each ParameterGroup is another one, in
// order, and a parameter belongs to the first that matches its name. Rules go by name because under
// FSDP a parameter is here its 1-D slice: "decay matrices alone" cannot look at dim() any more.
//
//   FusedAdamW optimizer(fsdp.named_parameters(), {.lr = 1e-3, .weight_decay = 0.1},
//                        {{.matches = IsBiasOrNorm, .options = {.lr = 1e-3, .weight_decay = 0}}});
//
// Only elementwise optimizers, as these are, are exact on slices. A slice may be empty.
//
// GRADIENTS. A parameter whose gradient is undefined is skipped, its state too. A gradient laid out
// in memory otherwise than its parameter is copied first.
//
// STATE is made by the constructor and kept by parameter name, under Python's keys: "step", a
// scalar in f32, and one tensor or two of the parameter's shape. torch::save(optimizer), whose
// format knows parameters by their addresses, is refused.
//
// ERRORS. std::exception of LibTorch (c10::Error) for what only the program can cause: a name given
// twice, a group that matches nothing, an undefined parameter, one whose elements do not fill one
// piece of memory, an option out of its range.
class FusedOptimizer : public torch::optim::Optimizer {
 public:
  // One update of all parameters. Returns the closure's loss, where there is one.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // For mixed precision in f16: later steps divide gradients by `scale` first, in place where they
  // are not copied, and do nothing where `found_inf` is not 0; both are f32 scalars on the
  // parameters' device. Undefined tensors, the default, turn it off. found_inf is read at each
  // step, for which a GPU is waited for.
  void SetGradientScale(at::Tensor scale, at::Tensor found_inf);

  // A piece of state. `value` is the optimizer's own tensor.
  struct State {
    std::string parameter;
    std::string key;
    at::Tensor value;
  };

  // All state, parameter by parameter in the order given to the constructor. Under FSDP values are
  // this rank's slices.
  std::vector<State> StateDict() const;

  // Copies `state` into this optimizer's. It must hold exactly what StateDict() does, in any order:
  // InvalidArgument names the first entry that is unknown, missing, given twice, undefined or of
  // another shape or dtype, and nothing was changed.
  absl::Status LoadStateDict(const std::vector<State>& state);

  // Calls `update` with all that StateDict() returns, for code that reads state piece by piece: it
  // may overwrite the values in place, which must not be done anywhere else.
  void UpdateState(const std::function<void(const State&)>& update);

  // The same with whole tensors, where `strategy` has shards: gathered piece by piece, so that no
  // rank ever holds more than a Unit's. Collective under FSDP.
  void UpdateFullState(Strategy& strategy, const std::function<void(const State&)>& update);

  // Parameters join by the constructor, with their names.
  void add_param_group(const torch::optim::OptimizerParamGroup&) = delete;
  void add_parameters(const std::vector<at::Tensor>&) = delete;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  // Options in the form that LibTorch's schedulers change.
  template <typename Values>
  struct GroupOptions : torch::optim::OptimizerCloneableOptions<GroupOptions<Values>> {
    explicit GroupOptions(const Values& given) : values(given) {}
    double get_lr() const override { return values.lr; }
    void set_lr(const double lr) override { values.lr = lr; }
    Values values;
  };

  struct GroupSpec {
    std::function<bool(const std::string& name)> matches;  // group 0: unused
    std::unique_ptr<torch::optim::OptimizerOptions> options;
    std::vector<std::string> state_keys;  // beside "step"
  };

  // A call of a kernel: tensors of one group, dtype and device that have gradients.
  struct Update {
    size_t group = 0;
    bool first = false;  // no parameter has been updated before; else all have
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> steps;                // counted already
    std::vector<std::vector<at::Tensor>> states;  // by state key
    std::optional<at::Tensor> scale;
  };

  FusedOptimizer(const std::vector<NamedTensor>& parameters, std::vector<GroupSpec> groups);

  template <typename Values>
  Values& OptionsOf(size_t group) {
    return static_cast<GroupOptions<Values>&>(param_groups_.at(group).options()).values;
  }

  virtual void Apply(Update& update) = 0;

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter;
    at::Tensor step;                 // a view of its batch's steps
    std::vector<at::Tensor> states;  // by state key
    size_t group = 0;
    bool started = false;  // whether it was ever updated
  };
  // Slots of one group, dtype and device.
  struct Batch {
    std::vector<size_t> slots;
    at::Tensor steps;
    Update later, first;  // kept for their memory
  };

  void StateChanged();
  void Add(Slot& slot, Update& update);
  static void Clear(Update& update);

  std::vector<std::vector<std::string>> state_keys_;  // by group
  std::vector<Slot> slots_;
  std::vector<Batch> batches_;
  at::Tensor scale_;
  at::Tensor found_inf_;
};

}  // namespace lockstep::parallel::optim
