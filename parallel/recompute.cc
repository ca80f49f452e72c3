#include "lockstep/parallel/recompute.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/parallel/node_ptr.h"
#include "lockstep/parallel/replay.h"

namespace lockstep::parallel {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

std::vector<at::Tensor> TrainableParameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> trainable;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.requires_grad() && seen.insert(parameter.unsafeGetTensorImpl()).second) {
      trainable.push_back(parameter);
    }
  }
  return trainable;
}

// What a recomputed forward must leave as it was, since it is needed again.
class UnchangedInputs {
 public:
  explicit UnchangedInputs(const std::vector<at::Tensor>& inputs) : inputs_(inputs) {
    for (const at::Tensor& input : inputs) versions_.push_back(VersionOf(input));
  }

  void Check(const torch::nn::Module& module) const {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      TORCH_CHECK(VersionOf(inputs_[i]) == versions_[i], "recomputation: ", module.name(),
                  "::forward changes tensor ", i,
                  " of its arguments in place, and so cannot be run again: let it make a new "
                  "tensor, or do not recompute this Unit");
    }
  }

 private:
  static int64_t VersionOf(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : tensor._version();
  }

  const std::vector<at::Tensor>& inputs_;
  std::vector<int64_t> versions_;
};

// Takes the tensor hooks of leaves away while it lives: they are for gradients that arrive, and
// autograd::grad() would run them on those that it returns too.
class WithoutTensorHooks {
 public:
  explicit WithoutTensorHooks(const std::vector<at::Tensor>& leaves) : leaves_(leaves) {
    for (const at::Tensor& leaf : leaves) {
      hooks_.push_back(std::exchange(torch::autograd::impl::hooks(leaf), {}));
    }
  }
  ~WithoutTensorHooks() {
    for (size_t i = 0; i < leaves_.size(); ++i) {
      torch::autograd::impl::hooks(leaves_[i]) = std::move(hooks_[i]);
    }
  }
  WithoutTensorHooks(const WithoutTensorHooks&) = delete;
  WithoutTensorHooks& operator=(const WithoutTensorHooks&) = delete;

 private:
  const std::vector<at::Tensor>& leaves_;
  std::vector<std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>> hooks_;
};

// Throws where the graph of `roots` ends in a leaf that is not among `known`, whose gradient
// autograd::grad() would drop without a word, or leaves what was made from sequence number `begin`
// on, to run through a part of the outer graph ahead of its time.
void CheckGraph(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& known,
                uint64_t begin, const torch::nn::Module& module) {
  std::unordered_set<const void*> leaves;
  for (const at::Tensor& tensor : known) leaves.insert(tensor.unsafeGetTensorImpl());
  std::unordered_set<const Node*> seen;
  std::vector<NodePtr> open;  // owned: a root that is a leaf may have no other owner
  const auto visit = [&](const Edge& edge) {
    if (edge.is_valid() && seen.insert(edge.function.get()).second) open.push_back(edge.function);
  };
  for (const at::Tensor& root : roots) visit(torch::autograd::impl::gradient_edge(root));
  while (!open.empty()) {
    const NodePtr node = std::move(open.back());
    open.pop_back();
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get())) {
      TORCH_CHECK(leaves.count(leaf->variable.unsafeGetTensorImpl()) == 1,
                  "recomputation: ", module.name(), "::forward uses a tensor of shape ",
                  leaf->variable.sizes(),
                  " that requires a gradient and is neither among its arguments nor a parameter of "
                  "the module, so its gradient would be lost: register it, pass it to forward, or "
                  "do not recompute this Unit");
    }
    // Leaves have the greatest number. Numbers are a thread's own: of a graph made on another
    // thread some are missed.
    TORCH_CHECK(node->sequence_nr() >= begin, "recomputation: ", module.name(),
                "::forward uses the result of ", node->name(),
                ", computed outside of it, that requires a gradient and is not among its "
                "arguments: pass it to forward, or do not recompute this Unit");
    for (const Edge& edge : node->next_edges()) visit(edge);
  }
}

// Stands in the graph for a whole forward. Its edges lead to the inputs, then to the parameters.
class RecomputeNode : public Node {
 public:
  RecomputeNode(torch::nn::Module& module, ForwardRunner::Body body,
                const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> parameters,
                Replay replay)
      : module_(module),
        keep_module_(module.weak_from_this().lock()),
        body_(std::move(body)),
        parameters_(std::move(parameters)),
        replay_(std::move(replay)) {
    for (const at::Tensor& input : inputs) {
      requires_grad_.push_back(input.requires_grad());
      inputs_.emplace_back(input, /*is_output=*/false);
    }
    set_next_edges(torch::autograd::collect_next_edges(inputs, parameters_));
  }

  std::string name() const override { return "Recompute"; }

  // Makes `outputs` this node's, which is `self`.
  void Own(const NodePtr& self, std::vector<at::Tensor>& outputs) {
    for (at::Tensor& output : outputs) {
      Output& kept = outputs_.emplace_back();
      kept.options = output.options();
      kept.sizes = output.sizes().vec();
      kept.differentiable = torch::autograd::isDifferentiableType(output.scalar_type());
      if (!kept.differentiable) continue;
      output = output.detach();  // it may be an input, or a view of one
      torch::autograd::set_history(output, self);
    }
  }

  variable_list apply(variable_list&& gradients) override {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    TORCH_CHECK(!at::GradMode::is_enabled(), "recomputation: ", module_.name(),
                " does not support double backward (create_graph)");
    std::vector<at::Tensor> inputs;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      inputs.push_back(inputs_[i].unpack().detach().set_requires_grad(requires_grad_[i]));
    }
    std::vector<at::Tensor> leaves = inputs;
    leaves.insert(leaves.end(), parameters_.begin(), parameters_.end());
    variable_list result(leaves.size());
    std::vector<at::Tensor> wanted;
    std::vector<size_t> places;
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (!task_should_compute_output(i)) continue;
      wanted.push_back(leaves[i]);
      places.push_back(i);
    }

    const ScratchBuffers scratch(module_);
    const uint64_t begin = at::sequence_number::peek();
    std::vector<at::Tensor> roots, root_gradients;
    SelectRoots(replay_.Run([&] { return body_(inputs); }), gradients, roots, root_gradients);
    gradients.clear();
    if (roots.empty() || wanted.empty()) return result;
    CheckGraph(roots, leaves, begin, module_);
    const WithoutTensorHooks without_hooks(wanted);
    variable_list found =
        torch::autograd::grad(roots, wanted, root_gradients, /*retain_graph=*/false,
                              /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = 0; i < places.size(); ++i) result[places[i]] = std::move(found[i]);
    return result;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    inputs_.clear();
  }

 private:
  struct Output {
    at::TensorOptions options;
    std::vector<int64_t> sizes;
    bool differentiable = false;
  };

  // Of the outputs of the second run those from which gradients go on, with these.
  void SelectRoots(const std::vector<at::Tensor>& outputs, const variable_list& gradients,
                   std::vector<at::Tensor>& roots, std::vector<at::Tensor>& root_gradients) const {
    TORCH_CHECK(outputs.size() == outputs_.size(), "recomputation: ", module_.name(),
                "::forward returned ", outputs_.size(), " tensors, and run again in backward ",
                outputs.size());
    size_t next = 0;
    for (size_t i = 0; i < outputs.size(); ++i) {
      TORCH_CHECK(outputs[i].sizes() == at::IntArrayRef(outputs_[i].sizes) &&
                      outputs[i].dtype() == outputs_[i].options.dtype(),
                  "recomputation: tensor ", i, " that ", module_.name(),
                  "::forward returned was of shape ", at::IntArrayRef(outputs_[i].sizes), " and ",
                  outputs_[i].options.dtype(), ", and run again in backward of shape ",
                  outputs[i].sizes(), " and ", outputs[i].dtype(),
                  ": module and arguments must stay as they are in between");
      if (!outputs_[i].differentiable) continue;
      const at::Tensor& gradient = gradients.at(next++);
      if (!gradient.defined() || !outputs[i].requires_grad()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(gradient);
    }
  }

  torch::nn::Module& module_;
  const std::shared_ptr<torch::nn::Module> keep_module_;  // null where no shared_ptr holds it
  const ForwardRunner::Body body_;
  std::vector<SavedVariable> inputs_;
  std::vector<bool> requires_grad_;  // of the inputs
  const std::vector<at::Tensor> parameters_;
  const Replay replay_;
  std::vector<Output> outputs_;
  bool released_ = false;
};

class RecomputeRunner : public ForwardRunner {
 public:
  std::vector<at::Tensor> Run(UnitModule& unit, const std::vector<at::Tensor>& inputs,
                              const Body& body) const override {
    torch::nn::Module& module = unit.module();
    if (!at::GradMode::is_enabled()) return body(inputs);
    std::vector<at::Tensor> parameters = TrainableParameters(module);
    if (parameters.empty() && !torch::autograd::any_variable_requires_grad(inputs)) {
      return body(inputs);
    }
    const UnchangedInputs unchanged(inputs);
    std::vector<at::Device> devices;
    for (const auto* tensors : {&inputs, &std::as_const(parameters)}) {
      for (const at::Tensor& tensor : *tensors) devices.push_back(tensor.device());
    }
    std::vector<at::Tensor> outputs;
    Replay replay(devices, [&] { outputs = body(inputs); });
    unchanged.Check(module);
    auto* const node =
        new RecomputeNode(module, body, inputs, std::move(parameters), std::move(replay));
    node->Own(OwnNode(node), outputs);
    return outputs;
  }
};

}  // namespace

void Recompute(torch::nn::Module& model, const std::function<bool(const NamedUnit& unit)>& which) {
  bool any = false;
  for (const NamedUnit& unit : FindUnits(model)) {
    if (!which(unit)) continue;
    SetRecompute(*unit.unit, true);
    any = true;
  }
  TORCH_CHECK(any, "Recompute: no Unit of ", model.name(),
              " was chosen: see FindUnits() for their names");
}

void SetRecompute(UnitModule& unit, bool recompute) {
  static const auto* const runner =
      new std::shared_ptr<const ForwardRunner>(std::make_shared<RecomputeRunner>());
  unit.SetForwardRunner(recompute ? *runner : nullptr);
}

}  // namespace lockstep::parallel
