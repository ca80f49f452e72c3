#include "lockstep/parallel/fsdp/random_plan.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace lockstep::parallel::testing {
namespace {

using Rng = std::mt19937_64;

int Draw(Rng& rng, int low, int high) { return std::uniform_int_distribution<>(low, high)(rng); }
bool Chance(Rng& rng, double p) { return std::bernoulli_distribution(p)(rng); }

// A choice of `values`, the first one most often.
template <typename T>
T Pick(Rng& rng, const std::vector<T>& values) {
  return Chance(rng, 0.5) ? values[0] : values[Draw(rng, 0, static_cast<int>(values.size()) - 1)];
}

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

}  // namespace

Plan DrawPlan(uint64_t seed) { return Drawer(seed).MakePlan(); }

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

}  // namespace lockstep::parallel::testing
