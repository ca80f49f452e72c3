// Random models, options and trainings under Fsdp against one process.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/fsdp/fsdp_build_scope.h"
#include "lockstep/parallel/none/none.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/optim/fused_sgd.h"
#include "lockstep/parallel/recompute.h"
#include "lockstep/parallel/testing/parity.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

constexpr int64_t kWidth = 5;  // of all activations, (B, 5) in f64

using Rng = std::mt19937_64;

int Draw(Rng& rng, int low, int high) { return std::uniform_int_distribution<>(low, high)(rng); }
bool Chance(Rng& rng, double p) { return std::bernoulli_distribution(p)(rng); }

// A choice of `values`, the first one most often.
template <typename T>
T Pick(Rng& rng, const std::vector<T>& values) {
  return Chance(rng, 0.5) ? values[0] : values[Draw(rng, 0, static_cast<int>(values.size()) - 1)];
}

// The plan: what all ranks build and do, drawn from the seed alone.

struct ParameterSpec {
  int id = 0;  // a parameter that is registered in several modules has one
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kDouble;
  bool transposed = false;
  bool frozen = false;
  bool toggled = false;  // requires_grad is changed after building
  bool is_new = true;    // else it was built in a module before
};

// What a module's forward does with a parameter, or with a module below it.
struct UseSpec {
  int id = 0;  // by which a forward leaves it out; -1: always there
  bool is_parameter = false;
  size_t target = 0;
  bool chained = false;  // x = f(x) and not x + f(x)
  bool detach_input = false;
  bool detach_output = false;
  bool in_place = false;  // changes the result
  bool parts = false;     // uses what else a tuple holds
};

struct ModuleSpec {
  enum Kind { kUnit, kTupleUnit, kPlain };
  int id = 0;
  Kind kind = kUnit;
  bool is_new = true;      // else it was built as part of a module before
  bool recompute = false;  // in Units
  bool dropped = false;    // constructed twice, and the first one dropped
  bool fresh = false;      // the result is no tensor that somebody else has
  bool buffers = false;
  std::vector<ParameterSpec> parameters;
  std::vector<ModuleSpec> children;
  std::vector<UseSpec> uses;
};

using Skips = std::set<int>;  // ids of uses that a forward leaves out

// Something beside training that must not disturb it.
struct Aside {
  enum Kind { kNothing, kEvaluate, kForwardAlone, kUnshard, kReadAll };
  Kind kind = kNothing;
  Skips skips;
  std::set<int> units;  // to unshard, counted modulo the Units there are
  bool wait = true;
  bool reshard = true;
};

struct MicroStep {
  std::vector<Skips> forwards;  // before the first backward
  bool one_backward = true;     // of the sum of losses; else one each, the last forward's first
  bool input_gradient = false;
  Aside between;  // forward and backward
};

struct Step {
  enum Zero { kToNone, kToZero, kNot };
  Zero zero = kToNone;
  Aside before;
  std::vector<MicroStep> micro_steps;  // all but the last under NoSync
  Aside after;                         // backward
  double clip_norm = 0;
  double clip_value = 0;
  bool compare_gradients = true;
  bool optimizer = true;
  bool update_state = false;
};

struct Plan {
  int ranks = 1;
  int batch = 1;  // a rank
  bool build_scope = false;
  bool recompute_first = false;  // before Fsdp, else after it
  bool sgd = false;
  FsdpOptions options;
  ModuleSpec model;
  std::vector<Step> steps;
  bool has_f32 = false;
};

class Drawer {
 public:
  explicit Drawer(uint64_t seed) : rng_(seed) {}

  Plan MakePlan() {
    plan_.ranks = Chance(rng_, 0.03) ? 8 : Draw(rng_, 1, 4);
    plan_.batch = Draw(rng_, 1, 3);
    plan_.build_scope = Chance(rng_, 0.3);
    plan_.recompute_first = Chance(rng_, 0.5);
    plan_.sgd = Chance(rng_, 0.5);
    f32_ = Chance(rng_, 0.3);
    DrawOptions();
    recompute_ = Chance(rng_, 0.4) ? 0.5 : 0;
    plan_.model = DrawModule(/*depth=*/0);
    skip_ = Chance(rng_, 0.5) ? 0.2 : 0;
    for (int step = Draw(rng_, 2, 5); step > 0; --step) plan_.steps.push_back(DrawStep());
    return std::move(plan_);
  }

 private:
  int Divisor(int whole) {
    int divisor = 0;
    do {
      divisor = Draw(rng_, 1, whole);
    } while (whole % divisor != 0);
    return divisor;
  }

  void DrawOptions() {
    FsdpOptions& options = plan_.options;
    options.sync_module_states = Chance(rng_, 0.6);
    options.sharding =
        Pick<Sharding>(rng_, {Sharding::kFull, Sharding::kGradOp, Sharding::kOptimizer});
    options.reshard_after_forward = Chance(rng_, 0.7);
    if (Chance(rng_, 0.4)) options.shard_size = Divisor(plan_.ranks);
    const int shard_size = options.shard_size == 0 ? plan_.ranks : options.shard_size;
    if (options.sharding == Sharding::kFull && options.reshard_after_forward && Chance(rng_, 0.4)) {
      options.reshard_size = Divisor(shard_size);
    }
    options.cpu_offload = Chance(rng_, 0.2);
    options.prefetch = Chance(rng_, 0.7);
    options.no_sync = Chance(rng_, 0.5) ? NoSyncGradients::kUnsharded : NoSyncGradients::kReduced;
    options.debug = Chance(rng_, 0.5);
  }

  ParameterSpec DrawParameter(bool frozen) {
    if (!parameters_.empty() && Chance(rng_, 0.1)) {
      ParameterSpec tied = parameters_[Draw(rng_, 0, static_cast<int>(parameters_.size()) - 1)];
      tied.is_new = false;
      return tied;
    }
    static const std::vector<std::vector<int64_t>> kSizes = {
        {5, 5}, {7, 15}, {16, 17}, {1}, {2}, {3}, {}, {0}, {0, 4}, {4, 0}, {2, 3, 2}, {1, 9}, {40}};
    ParameterSpec spec;
    spec.id = static_cast<int>(parameters_.size());
    spec.sizes = kSizes[Draw(rng_, 0, static_cast<int>(kSizes.size()) - 1)];
    if (f32_ && Chance(rng_, 0.4)) spec.dtype = at::kFloat;
    plan_.has_f32 = plan_.has_f32 || spec.dtype == at::kFloat;
    spec.transposed = spec.sizes.size() > 1 && Chance(rng_, 0.15);
    spec.frozen = frozen || Chance(rng_, 0.15);
    spec.toggled = Chance(rng_, 0.05);
    parameters_.push_back(spec);
    return spec;
  }

  UseSpec DrawUse(const ModuleSpec& spec, bool is_parameter, size_t target) {
    UseSpec use = {.id = next_use_++, .is_parameter = is_parameter, .target = target};
    if (is_parameter) return use;
    const ModuleSpec& child = spec.children[target];
    use.chained = Chance(rng_, 0.4);
    use.detach_input = Chance(rng_, 0.06);
    use.detach_output = Chance(rng_, 0.06);
    use.in_place = child.fresh && !use.detach_output && Chance(rng_, 0.3);
    use.parts = Chance(rng_, 0.6);
    return use;
  }

  ModuleSpec DrawModule(int depth) {
    if (depth > 0 && !modules_.empty() && Chance(rng_, 0.08)) {
      ModuleSpec again = modules_[Draw(rng_, 0, static_cast<int>(modules_.size()) - 1)];
      again.is_new = false;
      return again;
    }
    ModuleSpec spec;
    spec.id = next_module_++;
    if (depth > 0) {
      spec.kind = Pick<ModuleSpec::Kind>(
          rng_, {ModuleSpec::kUnit, ModuleSpec::kTupleUnit, ModuleSpec::kPlain});
    }
    const bool is_unit = spec.kind != ModuleSpec::kPlain;
    spec.recompute = is_unit && Chance(rng_, depth > 0 ? recompute_ : recompute_ / 5);
    spec.dropped = depth > 0 && Chance(rng_, 0.05);
    spec.fresh = Chance(rng_, 0.5);
    spec.buffers = Chance(rng_, 0.2);
    const bool frozen = depth > 0 && Chance(rng_, 0.1);
    for (int i = Draw(rng_, 0, 3); i > 0; --i) spec.parameters.push_back(DrawParameter(frozen));
    for (int i = depth < 3 ? Draw(rng_, depth > 0 ? 0 : 1, 3) : 0; i > 0 && next_module_ < 11;
         --i) {
      spec.children.push_back(DrawModule(depth + 1));
    }
    const auto times = [&] { return Chance(rng_, 0.05) ? 0 : Chance(rng_, 0.2) ? 2 : 1; };
    for (size_t i = 0; i < spec.parameters.size(); ++i) {
      for (int n = times(); n > 0; --n) spec.uses.push_back(DrawUse(spec, true, i));
    }
    for (size_t i = 0; i < spec.children.size(); ++i) {
      for (int n = times(); n > 0; --n) spec.uses.push_back(DrawUse(spec, false, i));
    }
    std::shuffle(spec.uses.begin(), spec.uses.end(), rng_);
    if (depth == 0) {  // so that each loss has a gradient
      ParameterSpec last = {.id = static_cast<int>(parameters_.size()), .sizes = {kWidth}};
      spec.uses.push_back({.id = -1, .is_parameter = true, .target = spec.parameters.size()});
      spec.parameters.push_back(last);
    }
    modules_.push_back(spec);
    return spec;
  }

  Skips DrawSkips() {
    Skips skips;
    for (int id = 0; id < next_use_; ++id) {
      if (Chance(rng_, skip_)) skips.insert(id);
    }
    return skips;
  }

  Aside DrawAside(double p, const std::vector<Aside::Kind>& kinds) {
    Aside aside;
    if (!Chance(rng_, p)) return aside;
    aside.kind = Pick(rng_, kinds);
    aside.skips = DrawSkips();
    for (int unit = 0; unit < 8; ++unit) {
      if (Chance(rng_, 0.3)) aside.units.insert(unit);
    }
    aside.wait = Chance(rng_, 0.5);
    aside.reshard = Chance(rng_, 0.5);
    return aside;
  }

  Step DrawStep() {
    Step step;
    step.zero = Pick<Step::Zero>(rng_, {Step::kToNone, Step::kToZero, Step::kNot});
    step.before =
        DrawAside(0.4, {Aside::kEvaluate, Aside::kForwardAlone, Aside::kUnshard, Aside::kReadAll});
    for (int i = Chance(rng_, 0.4) ? Draw(rng_, 2, 3) : 1; i > 0; --i) {
      MicroStep micro;
      for (int n = Chance(rng_, 0.25) ? 2 : 1; n > 0; --n) micro.forwards.push_back(DrawSkips());
      micro.one_backward = Chance(rng_, 0.5);
      micro.input_gradient = Chance(rng_, 0.2);
      micro.between = DrawAside(0.15, {Aside::kEvaluate, Aside::kForwardAlone, Aside::kUnshard});
      step.micro_steps.push_back(std::move(micro));
    }
    step.after = DrawAside(0.15, {Aside::kEvaluate, Aside::kForwardAlone, Aside::kReadAll});
    if (step.after.kind == Aside::kReadAll) step.after.reshard = true;  // parameters change next
    if (Chance(rng_, 0.3)) step.clip_norm = 0.3;
    if (Chance(rng_, 0.1)) step.clip_value = 0.02;
    step.compare_gradients = Chance(rng_, 0.6);
    step.optimizer = Chance(rng_, 0.9);
    step.update_state = Chance(rng_, 0.1);
    return step;
  }

  Rng rng_;
  Plan plan_;
  double recompute_ = 0;
  double skip_ = 0;
  bool f32_ = false;
  int next_module_ = 0;
  int next_use_ = 0;
  std::vector<ParameterSpec> parameters_;  // by id
  std::vector<ModuleSpec> modules_;        // those complete
};

std::string ToString(const Skips& skips) {
  return skips.empty() ? "" : absl::StrCat(" without ", absl::StrJoin(skips, ","));
}

std::string ToString(const ModuleSpec& spec, const std::string& indent) {
  static const char* const kKinds[] = {"Unit", "tuple Unit", "plain"};
  std::string text = absl::StrCat(indent, "m", spec.id, " ", kKinds[spec.kind]);
  if (!spec.is_new) return absl::StrCat(text, ", the same again\n");
  absl::StrAppend(&text, spec.recompute ? " recompute" : "", spec.dropped ? " dropped" : "",
                  spec.fresh ? " fresh" : "", spec.buffers ? " buffers" : "", "\n");
  for (const ParameterSpec& each : spec.parameters) {
    absl::StrAppend(&text, indent, "  p", each.id, " (", absl::StrJoin(each.sizes, ","), ")",
                    each.dtype == at::kFloat ? " f32" : "", each.transposed ? " transposed" : "",
                    each.frozen ? " frozen" : "", each.toggled ? " toggled" : "",
                    each.is_new ? "" : " tied", "\n");
  }
  for (const ModuleSpec& child : spec.children) {
    absl::StrAppend(&text, ToString(child, indent + "  "));
  }
  absl::StrAppend(&text, indent, "  forward:");
  for (const UseSpec& use : spec.uses) {
    absl::StrAppend(
        &text, " ", use.id, ":", use.is_parameter ? "p" : "m",
        use.is_parameter ? spec.parameters[use.target].id : spec.children[use.target].id,
        use.chained ? "/chained" : "", use.detach_input ? "/detach_input" : "",
        use.detach_output ? "/detach_output" : "", use.in_place ? "/in_place" : "",
        use.parts ? "/parts" : "");
  }
  return text + "\n";
}

std::string ToString(const Aside& aside) {
  static const char* const kKinds[] = {"", "evaluate", "forward alone", "unshard ", "read all"};
  if (aside.kind == Aside::kNothing) return "";
  std::string text = absl::StrCat("; ", kKinds[aside.kind]);
  if (aside.kind < Aside::kUnshard) return text + ToString(aside.skips);
  if (aside.kind == Aside::kUnshard) absl::StrAppend(&text, absl::StrJoin(aside.units, ","));
  return absl::StrCat(text, aside.wait ? "" : " no wait", aside.reshard ? " reshard" : "");
}

std::string ToString(const Plan& plan) {
  const FsdpOptions& o = plan.options;
  std::string text = absl::StrCat(
      plan.ranks, " ranks, batch ", plan.batch, plan.build_scope ? ", build scope" : "",
      plan.recompute_first ? ", recompute first" : "", plan.sgd ? ", SGD" : ", AdamW",
      "\nsync_module_states=", o.sync_module_states, " sharding=", static_cast<int>(o.sharding),
      " reshard_after_forward=", o.reshard_after_forward, " reshard_size=", o.reshard_size,
      " shard_size=", o.shard_size, " cpu_offload=", o.cpu_offload, " prefetch=", o.prefetch,
      " no_sync=", static_cast<int>(o.no_sync), " debug=", o.debug, "\n", ToString(plan.model, ""));
  static const char* const kZero[] = {"none", "zero", "not"};
  for (const Step& step : plan.steps) {
    absl::StrAppend(&text, "step: zero_grad ", kZero[step.zero], ToString(step.before));
    for (const MicroStep& micro : step.micro_steps) {
      absl::StrAppend(&text, "; forward");
      for (const Skips& skips : micro.forwards) absl::StrAppend(&text, " [", ToString(skips), "]");
      absl::StrAppend(&text, micro.input_gradient ? " input_gradient" : "", ToString(micro.between),
                      micro.one_backward ? "" : "; a backward each");
    }
    absl::StrAppend(&text, ToString(step.after), "; clip ", step.clip_norm, " ", step.clip_value,
                    step.compare_gradients ? "; compare" : "", step.optimizer ? "; update" : "",
                    step.update_state ? "; update state" : "", "\n");
  }
  return text;
}

// The model.

at::Tensor Mix(int64_t rows, int64_t columns, at::ScalarType dtype) {
  const at::Tensor index = at::arange(rows * columns, at::kDouble);
  return (at::sin(index * 1.3 + 0.7).view({rows, columns}) / std::sqrt(rows + 1.0)).to(dtype);
}

// Saves `p` or a view of it for backward.
at::Tensor Apply(const at::Tensor& p, const at::Tensor& x) {
  const at::ScalarType dtype = p.scalar_type();
  const int64_t inner = p.dim() == 2 ? p.size(1) : p.numel();
  at::Tensor y = x.to(dtype).matmul(Mix(kWidth, inner, dtype));
  y = at::tanh(p.dim() == 2 ? at::linear(y, p) : y * (p.dim() > 2 ? p.flatten() : p));
  return y.matmul(Mix(y.size(1), kWidth, dtype)).to(at::kDouble);
}

using Call = std::function<at::Tensor(const at::Tensor& x, const Skips& skips, bool parts)>;
struct Built {
  std::shared_ptr<torch::nn::Module> module;
  Call call;
};

struct Builder {
  uint64_t seed = 0;
  std::map<int, at::Tensor> parameters;              // by id
  std::map<int, Built> modules;                      // likewise
  std::vector<std::pair<at::Tensor, bool>> toggled;  // and their requires_grad at last
  std::vector<std::weak_ptr<torch::nn::Module>> recompute;
};

Built Build(const ModuleSpec& spec, Builder& builder);

class NodeImpl : public torch::nn::Module {
 public:
  NodeImpl(const ModuleSpec& spec, Builder& builder) : spec_(spec) {
    for (size_t i = 0; i < spec.parameters.size(); ++i) {
      const ParameterSpec& each = spec.parameters[i];
      at::Tensor& parameter = builder.parameters[each.id];
      if (!parameter.defined()) {
        parameter = Fill(each, builder.seed);
        if (each.toggled) builder.toggled.emplace_back(parameter, !each.frozen);
      }
      parameters_.push_back(
          register_parameter(absl::StrCat("p", i), parameter, each.frozen == each.toggled));
    }
    if (spec.buffers) {
      const double offset = 0.1 + 0.01 * static_cast<double>(builder.seed);
      offset_ = register_buffer("offset", at::full({kWidth}, offset, at::kDouble));
      count_ = register_buffer("count", at::zeros({}, at::kLong));
    }
    for (size_t i = 0; i < spec.children.size(); ++i) {
      if (spec.children[i].dropped && spec.children[i].is_new) {
        Builder dropped = builder;
        Build(spec.children[i], dropped);
      }
      children_.push_back(Build(spec.children[i], builder));
      register_module(absl::StrCat("m", i), children_.back().module);
    }
  }

 protected:
  at::Tensor Run(at::Tensor x, const Skips& skips) {
    if (count_.defined()) {
      x = x + offset_;
      at::NoGradGuard no_grad;
      count_.add_(1);
    }
    for (const UseSpec& use : spec_.uses) {
      if (skips.count(use.id) != 0) continue;
      if (use.is_parameter) {
        x = x + Apply(parameters_[use.target], x);
        continue;
      }
      at::Tensor y =
          children_[use.target].call(use.detach_input ? x.detach() : x, skips, use.parts);
      if (use.in_place) y.mul_(0.9);
      if (use.detach_output) y = y.detach();
      x = use.chained ? y : x + 0.5 * y;
    }
    return spec_.fresh ? x * 0.95 : x;
  }

 private:
  static at::Tensor Fill(const ParameterSpec& spec, uint64_t seed) {
    const at::Tensor values =
        at::randn(spec.sizes, at::detail::createCPUGenerator(seed * 1000 + spec.id), at::kDouble)
            .to(spec.dtype);
    if (!spec.transposed) return values;
    return values.transpose(0, 1).contiguous().transpose(0, 1);
  }

  const ModuleSpec& spec_;
  std::vector<at::Tensor> parameters_;
  std::vector<Built> children_;
  at::Tensor offset_;
  at::Tensor count_;
};

class BlockImpl : public NodeImpl {
 public:
  using NodeImpl::NodeImpl;
  at::Tensor forward(at::Tensor x, const Skips& skips) { return Run(x, skips); }
};

class TupleBlockImpl : public NodeImpl {
 public:
  using NodeImpl::NodeImpl;
  std::tuple<std::optional<at::Tensor>, at::Tensor, std::vector<at::Tensor>> forward(
      const at::Tensor& x, Skips skips) {
    const at::Tensor y = Run(x, skips);
    return {at::full({y.size(0), 1}, 3, at::kLong), y, {at::tanh(y), y.detach()}};
  }
};

Built Build(const ModuleSpec& spec, Builder& builder) {
  if (!spec.is_new) return builder.modules.at(spec.id);
  Built built;
  if (spec.kind == ModuleSpec::kUnit) {
    Unit<BlockImpl> unit(spec, builder);
    built = {unit.ptr(), [unit](const at::Tensor& x, const Skips& skips, bool) mutable {
               return unit(x, skips);
             }};
  } else if (spec.kind == ModuleSpec::kPlain) {
    const auto block = std::make_shared<BlockImpl>(spec, builder);
    built = {block, [block](const at::Tensor& x, const Skips& skips, bool) {
               return block->forward(x, skips);
             }};
  } else {
    Unit<TupleBlockImpl> unit(spec, builder);
    built = {unit.ptr(), [unit](const at::Tensor& x, const Skips& skips, bool use_parts) mutable {
               const auto [number, y, parts] = unit(x, skips);
               return use_parts ? y + 0.1 * *number + 0.3 * parts[0] + 0.2 * parts[1] : y;
             }};
  }
  builder.modules[spec.id] = built;
  if (spec.recompute) builder.recompute.push_back(built.module);
  return built;
}

// Training.

class Training {
 public:
  // As rank `rank`; `comm` null: alone, on all ranks' samples.
  Training(const Plan& plan, Built model, Strategy& strategy, int rank, comm::Communicator* comm)
      : plan_(plan),
        model_(std::move(model)),
        strategy_(strategy),
        fsdp_(dynamic_cast<Fsdp*>(&strategy)),
        rank_(rank),
        comm_(comm) {
    if (plan.sgd) {
      optimizer_ = std::make_unique<optim::FusedSgd>(
          strategy.named_parameters(),
          optim::FusedSgdOptions{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01});
    } else {
      optimizer_ = std::make_unique<optim::FusedAdamW>(
          strategy.named_parameters(),
          optim::FusedAdamWOptions{.lr = 1e-2, .eps = plan.has_f32 ? 1e-3 : 1e-8});
    }
  }

  testing::Trajectory Run() {
    for (const Step& step : plan_.steps) RunStep(step);
    strategy_.VisitState([&](const std::string& name, const at::Tensor& full) {
      trajectory_.state[name] = full.clone();
    });
    optimizer_->UpdateFullState(strategy_, [&](const optim::FusedOptimizer::State& state) {
      trajectory_.optimizer[state.parameter + "/" + state.key] = state.value.clone();
    });
    at::Tensor losses = at::tensor(losses_, at::kDouble);
    if (comm_ != nullptr) ThrowIfError(comm_->AllReduce(losses, comm::ReduceOp::kAverage).Wait());
    for (int64_t i = 0; i < losses.numel(); ++i) {
      trajectory_.losses.push_back(losses[i].item<double>());
    }
    return std::move(trajectory_);
  }

 private:
  void RunStep(const Step& step) {
    if (step.zero != Step::kNot) optimizer_->zero_grad(step.zero == Step::kToNone);
    RunAside(step.before);
    for (const MicroStep& micro : step.micro_steps) {
      std::optional<Strategy::NoSyncScope> no_sync;
      if (&micro != &step.micro_steps.back()) no_sync.emplace(strategy_);
      std::vector<at::Tensor> losses;
      for (const Skips& skips : micro.forwards) {
        losses.push_back(Loss(skips, micro.input_gradient));
      }
      RunAside(micro.between);
      if (micro.one_backward) {
        at::Tensor sum = losses[0];
        for (size_t i = 1; i < losses.size(); ++i) sum = sum + losses[i];
        losses = {sum};
      }
      for (; !losses.empty(); losses.pop_back()) losses.back().backward();
    }
    RunAside(step.after);
    if (step.clip_norm > 0) trajectory_.norms.push_back(strategy_.ClipGradNorm(step.clip_norm));
    if (step.clip_value > 0) strategy_.ClipGradValue(step.clip_value);
    if (step.compare_gradients) CollectGradients();
    if (step.optimizer) optimizer_->step();
    if (step.update_state) {
      strategy_.UpdateState([](const std::string&, at::Tensor full) {
        if (full.is_floating_point()) full.mul_(0.9);
      });
    }
  }

  // The mean over this rank's part of the next samples.
  at::Tensor Loss(const Skips& skips, bool input_gradient = false) {
    const int64_t batch = comm_ == nullptr ? plan_.batch * plan_.ranks : plan_.batch;
    const int64_t first = (calls_++ * plan_.ranks + rank_) * plan_.batch;
    at::Tensor x = at::sin(at::arange(first * kWidth, (first + batch) * kWidth, at::kDouble) * 1.7)
                       .view({batch, kWidth});
    x.set_requires_grad(input_gradient);
    const at::Tensor y = model_.call(x, skips, /*parts=*/false);
    const at::Tensor loss = at::tanh(y * 0.3).square().sum(1).mean() + 0.1 * y.mean();
    losses_.push_back(loss.item<double>());
    return loss;
  }

  void RunAside(const Aside& aside) {
    if (aside.kind == Aside::kEvaluate) {
      at::NoGradGuard no_grad;
      Loss(aside.skips);
    } else if (aside.kind == Aside::kForwardAlone) {
      Loss(aside.skips);
    } else if (aside.kind != Aside::kNothing) {
      RunUnshard(aside);
    }
  }

  void RunUnshard(const Aside& aside) {
    const std::vector<NamedUnit> all = FindUnits(*model_.module);
    const bool read = aside.kind == Aside::kReadAll;
    std::vector<std::string> units;
    for (size_t i = 0; i < all.size(); ++i) {
      if (read || aside.units.count(static_cast<int>(i)) != 0) units.push_back(all[i].name);
    }
    if (fsdp_ != nullptr) {
      for (const std::string& unit : units) fsdp_->Unshard(unit, aside.wait || read);
    }
    if (read) {
      double sum = 0;
      for (const at::Tensor& each : model_.module->parameters()) {
        sum += each.detach().to(at::kDouble).square().sum().item<double>();
      }
      trajectory_.norms.push_back(sum);
    }
    if (fsdp_ != nullptr && aside.reshard) {
      for (const std::string& unit : units) fsdp_->Reshard(unit);
    }
  }

  void CollectGradients() {
    std::vector<NamedTensor> gradients;
    for (const NamedTensor& each : strategy_.named_parameters()) {
      if (each.tensor.grad().defined()) gradients.push_back({each.name, each.tensor.grad()});
    }
    testing::NamedState& whole = trajectory_.gradients.emplace_back();
    strategy_.UpdateFull(gradients, [&](const std::string& name, const at::Tensor& full) {
      whole[name] = full.clone();
    });
  }

  const Plan& plan_;
  Built model_;
  Strategy& strategy_;
  Fsdp* const fsdp_;
  const int rank_;
  comm::Communicator* const comm_;
  std::unique_ptr<optim::FusedOptimizer> optimizer_;
  int64_t calls_ = 0;
  std::vector<double> losses_;
  testing::Trajectory trajectory_;
};

Built BuildModel(const Plan& plan, Builder& builder, int rank) {
  // Ranks begin with different values where rank 0's are to be copied.
  builder.seed = plan.options.sync_module_states ? rank : 0;
  Built model = Build(plan.model, builder);
  for (auto& [parameter, requires_grad] : builder.toggled) {
    parameter.set_requires_grad(requires_grad);
  }
  return model;
}

void SetRecomputed(const Builder& builder) {
  for (const auto& module : builder.recompute) {
    if (const auto alive = module.lock()) {
      SetRecompute(dynamic_cast<UnitModule&>(*alive), /*recompute=*/true);
    }
  }
}

testing::Trajectory TrainAlone(const Plan& plan) {
  Builder builder;
  const Built model = BuildModel(plan, builder, /*rank=*/0);
  None none(model.module);
  return Training(plan, model, none, /*rank=*/0, /*comm=*/nullptr).Run();
}

testing::Trajectory TrainSharded(const Plan& plan, comm::Communicator& comm) {
  Builder builder;
  std::optional<FsdpBuildScope> scope;
  if (plan.build_scope) scope.emplace(comm, plan.options);
  const Built model = BuildModel(plan, builder, comm.rank());
  if (plan.recompute_first) SetRecomputed(builder);
  std::unique_ptr<Fsdp> fsdp;
  if (plan.build_scope) {
    fsdp = std::make_unique<Fsdp>(model.module, *scope);
  } else {
    fsdp = std::make_unique<Fsdp>(model.module, comm, plan.options);
  }
  if (!plan.recompute_first) SetRecomputed(builder);
  return Training(plan, model, *fsdp, comm.rank(), &comm).Run();
}

void ExpectEqualsOneProcess(const Plan& plan) {
  const testing::Trajectory expected = TrainAlone(plan);
  comm::testing::RunRanks(plan.ranks, [&](comm::Communicator& comm) {
    testing::ExpectSame(TrainSharded(plan, comm), expected, plan.has_f32 ? at::kFloat : at::kDouble,
                        absl::StrCat("rank ", comm.rank()));
  });
}

TEST(FsdpRandomTest, EqualsOneProcess) {
  const char* given = std::getenv("LOCKSTEP_SEED");
  const uint64_t first = given != nullptr ? std::stoull(given) : std::random_device()();
  const int cases = given != nullptr ? 1 : std::getenv("LOCKSTEP_SOAK") != nullptr ? 5000 : 150;
  for (int i = 0; i < cases; ++i) {
    const uint64_t seed = first + i;
    const Plan plan = Drawer(seed).MakePlan();
    try {
      ExpectEqualsOneProcess(plan);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "alone: " << error.what();
    }
    if (!HasFailure()) continue;
    // Ranks' threads know no SCOPED_TRACE.
    ADD_FAILURE() << "repeat with LOCKSTEP_SEED=" << seed << "\n" << ToString(plan);
    return;
  }
}

}  // namespace
}  // namespace lockstep::parallel
